//! Clients of many kinds, the far side that they talk to, and what each of them has to tell afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use vipgate::lab::{Host, Process};

use super::LINES;
use crate::traffic::script;
use crate::wait_for;

/// What many clients do.
#[derive(Clone, Debug)]
pub struct Traffic<'a> {
    /// Whom they ask.
    pub to: (&'a str, u16),
    /// Their addresses, in turn; empty: the host's own.
    pub sources: Vec<String>,
    /// How many there are.
    pub count: u32,
    /// How many begin in a second.
    pub rate: u32,
    /// How many there may be at once.
    pub at_once: u32,
    /// How many lines each of them says; 0: until the end.
    pub lines: u32,
    /// Of so many in a hundred, the seconds from line to line.
    pub paces: &'a [(u32, f64, f64)],
    /// Seconds that an answer may take.
    pub patience: u32,
    /// The length of a line.
    pub bytes: u32,
    /// Whether those who have said all their lines keep their port until the end.
    pub stay: bool,
    /// Datagrams instead of connections.
    pub udp: bool,
}

impl Default for Traffic<'_> {
    fn default() -> Self {
        Self {
            to: (super::SERVER[0], LINES),
            sources: Vec::new(),
            count: 1,
            rate: 1000,
            at_once: u32::MAX,
            lines: 0,
            paces: &[(100, 0.05, 0.2)],
            patience: 10,
            bytes: 16,
            stay: false,
            udp: false,
        }
    }
}

impl Traffic<'_> {
    /// Flows of datagrams that show how long nothing came through.
    pub fn probes(to: &str, sources: Vec<String>, count: u32) -> Traffic<'_> {
        Traffic { to: (to, LINES), sources, count, paces: &[(100, 0.02, 0.03)], udp: true, ..Traffic::default() }
    }

    /// Connections that stay, one in twenty of which speaks often; all together no more than a small machine can bear.
    pub fn held(to: &str, sources: Vec<String>, count: u32) -> Traffic<'_> {
        let paces = &[(5, 0.05, 0.2), (95, 1.5, 2.5)];
        Traffic { to: (to, LINES), sources, count, rate: 1500, paces, patience: 15, ..Traffic::default() }
    }

    /// Connections that say one line and end.
    pub fn brief(to: &str, sources: Vec<String>, count: u32, rate: u32) -> Traffic<'_> {
        Traffic { to: (to, LINES), sources, count, rate, at_once: 500, lines: 1, ..Traffic::default() }
    }
}

/// Clients that run.
#[derive(Debug)]
pub struct Clients {
    process: Process,
    log: PathBuf,
    result: PathBuf,
    count: u32,
}

impl Clients {
    /// Lets them begin. `name` names their files; identities count on from `first`, and tell all clients of a test apart.
    pub fn start(folder: &Path, host: &Host, name: &str, first: u32, traffic: &Traffic<'_>) -> Self {
        let Traffic { to, sources, count, rate, at_once, lines, paces, patience, bytes, stay, udp } = traffic;
        let plan = json!({
            "protocol": if *udp { "udp" } else { "tcp" }, "to": to.0, "port": to.1, "sources": sources, "count": count,
            "first": first, "rate": rate, "at_once": at_once, "lines": lines, "paces": paces, "patience": patience,
            "bytes": bytes, "stay": stay,
        });
        let file = |ending: &str| folder.join(format!("clients-{name}.{ending}"));
        fs::write(file("plan"), plan.to_string()).unwrap();
        let (plan, result, log) = (file("plan").display().to_string(), file("json"), file("log"));
        let command = ["python3", &script("cluster/line_clients.py"), &plan, &result.display().to_string()];
        let process = host.spawn(&command, &log).unwrap();
        Self { process, log, result, count: *count }
    }

    /// What they have said in whole lines: an unbuffered Python writes a line in pieces.
    fn said(&self) -> String {
        let mut said = fs::read_to_string(&self.log).unwrap();
        said.truncate(said.rfind('\n').map_or(0, |end| end + 1));
        said
    }

    /// Waits until all of them have begun, and were answered or have waited long enough.
    pub fn wait_begun(&mut self, patience: Duration) {
        let have_begun = self.have_begun(patience);
        assert!(have_begun, "not all of {} clients have begun: {}", self.count, self.said());
    }

    fn have_begun(&mut self, patience: Duration) -> bool {
        wait_for(patience, || self.said().contains("open ") || !self.process.is_alive())
    }

    /// Waits until all of them have begun, and were answered.
    pub fn wait_open(&mut self, patience: Duration) {
        self.have_begun(patience);
        if self.said().contains(&format!("open {}\n", self.count)) {
            return;
        }
        self.stop();
        self.process.wait(Duration::from_secs(20));
        let bad: Vec<Client> =
            self.read().into_iter().filter(|client| client.lines[1] == 0 || !client.is_well()).collect();
        panic!("{} of {} clients don't stand, at {}: {:?}", bad.len(), self.count, moment(), &bad[..bad.len().min(5)]);
    }

    fn read(&self) -> Vec<Client> {
        let rows: Vec<Value> = serde_json::from_str(&fs::read_to_string(&self.result).unwrap()).unwrap();
        rows.iter().map(Client::read).collect()
    }

    /// Ends them, and tells what became of each.
    pub fn end(self) -> Outcome {
        self.stop();
        self.wait(Duration::from_mins(1))
    }

    /// Lets them say nothing more, and hear what is under way.
    pub fn stop(&self) {
        self.process.signal("TERM").unwrap();
    }

    /// Ends those of several processes at the same time.
    pub fn end_all<const N: usize>(clients: [Self; N]) -> [Outcome; N] {
        clients.iter().for_each(Self::stop);
        clients.map(|clients| clients.wait(Duration::from_mins(1)))
    }

    /// Waits until they end by themselves.
    pub fn wait(mut self, patience: Duration) -> Outcome {
        let ended = self.process.wait(patience);
        assert!(ended.is_some_and(|status| status.success()), "the clients don't end: {}", self.said());
        Outcome(self.read())
    }
}

/// What became of one client.
#[derive(Clone, Debug)]
pub struct Client {
    /// Who it is, in every line.
    pub identity: String,
    /// Its own address, where it was told one.
    pub source: String,
    /// When it began, in seconds of the wall clock.
    pub opened: f64,
    /// Seconds from line to line, about.
    pub pace: f64,
    /// Lines that it has said, and that were answered.
    pub lines: [u64; 2],
    /// The longest wait in seconds, and when it was over.
    pub longest: [f64; 2],
    /// `alive`, `done`, `silent`, or what the kernel said.
    pub end: String,
    /// Answers that were meant for others.
    pub wrong: u64,
}

impl Client {
    fn read(row: &Value) -> Self {
        let (text, float) = (|n: usize| row[n].as_str().unwrap().to_owned(), |n: usize| row[n].as_f64().unwrap());
        Self {
            identity: text(0),
            source: text(1),
            opened: float(3),
            pace: float(4),
            lines: [5, 6].map(|n| row[n].as_u64().unwrap()),
            longest: [float(7), float(8)],
            end: text(9),
            wrong: row[10].as_u64().unwrap(),
        }
    }

    /// Whether it came to a good end.
    pub fn is_well(&self) -> bool {
        self.end == "alive" || self.end == "done"
    }
}

/// What became of all of them.
#[derive(Clone, Debug)]
pub struct Outcome(pub Vec<Client>);

impl Outcome {
    /// Those that were older than this when a moment came.
    #[must_use]
    pub fn older(&self, age: f64, moment: f64) -> Self {
        Self(self.0.iter().filter(|client| client.opened + age <= moment).cloned().collect())
    }

    /// Those that began after a moment.
    #[must_use]
    pub fn younger(&self, moment: f64) -> Self {
        Self(self.0.iter().filter(|client| client.opened > moment).cloned().collect())
    }

    /// How many there are, and how many of them came to no good end.
    pub fn lost(&self) -> [usize; 2] {
        [self.0.len(), self.0.iter().filter(|client| !client.is_well()).count()]
    }

    /// So many in a hundred have lived.
    pub fn check_survived(&self, percent: usize) {
        let [all, lost] = self.lost();
        assert!(all > 0 && lost * 100 <= all * (100 - percent), "{}", self.summary());
    }

    /// The longest wait that any client had who speaks at least this often, in seconds.
    pub fn longest(&self, pace: f64) -> f64 {
        self.0.iter().filter(|client| client.pace <= pace).map(|client| client.longest[0]).fold(0.0, f64::max)
    }

    /// The wait that all but one in a hundred of these didn't exceed.
    pub fn p99(&self, pace: f64) -> f64 {
        let mut waits: Vec<f64> =
            self.0.iter().filter(|client| client.pace <= pace).map(|client| client.longest[0]).collect();
        waits.sort_by(f64::total_cmp);
        waits.get((waits.len() * 99).saturating_sub(1) / 100).copied().unwrap_or_default()
    }

    /// Nobody heard what was meant for another.
    pub fn check_nobody_else_was_heard(&self) {
        let wrong: Vec<&Client> = self.0.iter().filter(|client| client.wrong > 0).collect();
        assert!(wrong.is_empty(), "{} heard others, as {:?}", wrong.len(), wrong[0]);
    }

    /// All came to a good end.
    pub fn check_all_well(&self) {
        self.check_nobody_else_was_heard();
        let bad: Vec<&Client> = self.0.iter().filter(|client| !client.is_well()).collect();
        assert!(bad.is_empty(), "{} of {} failed, as {:?}", bad.len(), self.0.len(), &bad[..bad.len().min(3)]);
    }

    /// In a line, for people.
    pub fn summary(&self) -> String {
        let mut ends = std::collections::BTreeMap::new();
        for client in &self.0 {
            *ends.entry(client.end.as_str()).or_insert(0) += 1;
        }
        let fast = 0.2;
        format!(
            "{} clients {ends:?}; who speaks often waited {:.3} s at most, {:.3} at p99",
            self.0.len(),
            self.longest(fast),
            self.p99(fast)
        )
    }
}

/// Answers many clients on a host.
#[derive(Debug)]
pub struct LineServer {
    process: Process,
    record: PathBuf,
}

/// Somebody as the far side has seen him.
#[derive(Clone, Debug)]
pub struct Record {
    /// Whether by datagrams.
    pub udp: bool,
    /// His address and port, as seen there.
    pub peer: (String, u16),
    /// The address of the far side that he talked to.
    pub local: String,
    /// Who he said he is.
    pub identity: String,
    /// Lines or datagrams.
    pub lines: u64,
    /// Lines that weren't his, or not in order.
    pub faults: u64,
}

impl LineServer {
    /// One that listens.
    pub fn start(folder: &Path, host: &Host) -> Self {
        let file = |ending: &str| folder.join(format!("lines-{}.{ending}", host.name()));
        let (log, record) = (file("log"), file("json"));
        let command = ["python3", &script("cluster/line_server.py"), &LINES.to_string(), &record.display().to_string()];
        let process = host.spawn(&command, &log).unwrap();
        let listens = || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening"));
        assert!(wait_for(Duration::from_secs(10), listens), "{}", fs::read_to_string(&log).unwrap());
        Self { process, record }
    }

    /// Ends it; whom it has seen.
    pub fn end(mut self) -> Vec<Record> {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(20)).expect("it ends");
        let told: Value = serde_json::from_str(&fs::read_to_string(&self.record).unwrap()).unwrap();
        let text = |row: &Value, n: usize| row[n].as_str().unwrap().to_owned();
        let read = |row: &Value, udp: bool| Record {
            udp,
            peer: (text(row, 0), row[1].as_u64().unwrap() as u16),
            local: text(row, 2),
            identity: text(row, 3),
            lines: row[6].as_u64().unwrap(),
            faults: if udp { 0 } else { row[7].as_u64().unwrap() },
        };
        let rows = |kind: &str| told[kind].as_array().unwrap().clone();
        let tcp = rows("tcp").into_iter().map(|row| read(&row, false));
        tcp.chain(rows("udp").into_iter().map(|row| read(&row, true))).collect()
    }
}

/// A download that is checked byte by byte.
#[derive(Debug)]
pub struct Download {
    process: Process,
    log: PathBuf,
}

impl Download {
    /// Begins one of so many bytes, at so many in a second, and returns when it has.
    pub fn start(folder: &Path, host: &Host, server: &str, bytes: u64, rate: u64) -> Self {
        let log = folder.join(format!("download-{}-{}.log", host.name(), server.replace(':', "-")));
        let numbers = [LINES + 1].map(|port| port.to_string());
        let (bytes, rate) = (bytes.to_string(), rate.to_string());
        let command = ["python3", &script("cluster/download.py"), server, &numbers[0], &bytes, &rate];
        let process = host.spawn(&command, &log).unwrap();
        let begun = || fs::read_to_string(&log).is_ok_and(|log| log.contains("open 1"));
        assert!(wait_for(Duration::from_secs(10), begun), "{}", fs::read_to_string(&log).unwrap());
        Self { process, log }
    }

    /// Waits for its end. Every byte came, and was right; the longest time in seconds in which none came.
    pub fn end(mut self, patience: Duration) -> f64 {
        let ended = self.process.wait(patience);
        let said = fs::read_to_string(&self.log).unwrap();
        assert!(ended.is_some(), "the download doesn't end: {said}");
        let result: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        assert!(result["whole"] == true && result["error"] == "", "{result}");
        result["longest"].as_f64().unwrap()
    }
}

/// Now, as clients tell it.
pub fn moment() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}
