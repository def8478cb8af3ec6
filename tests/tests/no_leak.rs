//! No leak under any frame: whatever pods, a router inside or hosts outside send, nothing leaves with a covered pod's
//! address as source, or in the quote of an ICMP error, except to destinations that see it by policy. The counterpart of
//! the engine's oracle (`dataplane/tests/engine/no_leak.rs`) for what the kernel is part of: it forwards what the
//! steering program passes, and what nobody has captured.
//!
//! Members of a class that are random follow from a seed, which is printed; `VIPGATE_NO_LEAK_SEED` repeats a run.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use vipgate_lab::Host;
use vipgate_tests::cluster::Captures;
use vipgate_tests::frames::{CLASSES, Frame, Macs, PODS, SESSION, Sender, list, number, send};
use vipgate_tests::verifier::Packet;
use vipgate_tests::{EXCLUDED, SERVER, Testbed, VIP_A, wait_for};

const CLUSTER: &str = "pod_cidrs: [10.1.0.0/16, \"fd00:1::/32\"]";
const POLICIES: [&str; 2] = ["tenant-a.yaml", "tenant-b.yaml"];
const INTERFACES: [&str; 2] = ["gw-in", "gw-out"];
/// The state in which a covered pod's address is any other one: the kernel may send it back to where it came from.
const WITHDRAWN: &str = "withdrawn";
/// In the order in which they send: the first one opens the sessions that errors of the last pod are about.
const SENDERS: [Sender; 4] = [Sender::Pod(0), Sender::Pod(2), Sender::Pod(3), Sender::Router];
/// Time for what was sent to pass the gateway.
const DRAIN_TIME: Duration = Duration::from_millis(300);
/// Classes that a kernel forwards, so that they show a pod where no gateway runs.
const FORWARDED: [&str; 8] =
    ["plain", "tags", "MAC addresses", "IPv4 options", "extension headers", "protocols", "fragments", "errors"];
/// Described leaks of a failed test.
const MAX_DESCRIBED: usize = 12;

/// Which pods' addresses are hidden, and from whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// All, from everybody: no policy is in force, and uncovered pods don't leave the cluster.
    All,
    /// All, but p3's from destinations that its policy excludes.
    Covered,
    /// Those of covered pods; p4 is uncovered, and may be seen.
    CoveredOnly,
}

impl Rule {
    fn hides(self, address: IpAddr, receiver: IpAddr) -> bool {
        let is = |text: &str, address: IpAddr| text.parse::<IpAddr>() == Ok(address);
        let Some(pod) = PODS.iter().position(|both| both.iter().any(|text| is(text, address))) else { return false };
        match pod {
            2 => self == Self::All || !EXCLUDED.iter().any(|text| is(text, receiver)),
            3 => self != Self::CoveredOnly,
            _ => true,
        }
    }
}

/// A state of the gateway, and what was sent in it.
struct Run {
    name: &'static str,
    rule: Rule,
    /// When it began, in nanoseconds of the wall clock, as captures have it.
    since: u64,
    frames: Vec<Frame>,
}

impl Run {
    /// The class of the frame that a captured packet was, and a description, if it shows a hidden address.
    fn leak(&self, captured: &[u8]) -> Option<(&'static str, String)> {
        let packet = Packet::in_frame(captured)?;
        let [source, receiver] = packet.addresses;
        let mut shown = packet.quotes().flat_map(|quoted| quoted.addresses).chain([source]);
        let hidden = shown.find(|address| *address != receiver && self.rule.hides(*address, receiver))?;
        let sent = number(packet.bytes).and_then(|number| self.frames.get(number));
        let class = sent.map_or("unknown", |frame| frame.class);
        let frame = sent.map_or(&[][..], |frame| &frame.bytes[..]);
        let name = self.name;
        Some((class, format!("{name}: {receiver} sees {hidden} by {captured:02x?}, of class {class}: {frame:02x?}")))
    }
}

struct Bed {
    testbed: Testbed,
    macs: Macs,
    seed: u64,
    runs: Vec<Run>,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

fn seed() -> u64 {
    let seed = std::env::var("VIPGATE_NO_LEAK_SEED").ok();
    let seed = seed.map_or_else(now, |text| text.parse().expect("VIPGATE_NO_LEAK_SEED is a number"));
    println!("VIPGATE_NO_LEAK_SEED={seed}");
    seed
}

fn mac(host: &Host, interface: &str) -> [u8; 6] {
    let text = host.output(&["cat", &format!("/sys/class/net/{interface}/address")]).unwrap();
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

impl Bed {
    /// The testbed, without a gateway. Nothing in it but the gateway drops frames: no filter of sources, no snooping of
    /// groups; neighbors know each other.
    fn new(seed: u64) -> Self {
        let mut testbed = Testbed::new("no-leak");
        testbed.uses_policy_server = false;
        // Which of them drops what depends on the frames.
        testbed.accounting.allow_all();
        for interface in ["all", "default", "gw-in", "gw-out"] {
            testbed.gateway.sysctl(&format!("net.ipv4.conf.{interface}.rp_filter"), 0).unwrap();
        }
        testbed.switch.ip(&["link", "set", "pods", "type", "bridge", "mcast_snooping", "0"]).unwrap();
        for (host, server) in testbed.pods.iter().chain([&testbed.gateway]).flat_map(|it| SERVER.map(|to| (it, to))) {
            let is_reached = || host.output(&["ping", "-c", "1", "-W", "1", server]).is_ok();
            assert!(wait_for(Duration::from_secs(5), is_reached), "{} doesn't reach {server}", host.name());
        }
        let macs = Macs {
            gateway: INTERFACES.map(|interface| mac(&testbed.gateway, interface)),
            pods: [0, 1, 2, 3].map(|pod| mac(&testbed.pods[pod], "eth0")),
            router: mac(&testbed.router, "to-gw"),
        };
        let bed = Self { testbed, macs, seed, runs: Vec::new() };
        bed.set_tags_in_frames(true);
        bed
    }

    /// Puts VLAN tags into frames, as on a physical wire, or into metadata of the link.
    fn set_tags_in_frames(&self, in_frames: bool) {
        let offload = if in_frames { "off" } else { "on" };
        let offloads = ["ethtool", "-K", "to-gw", "txvlan", offload, "tx-vlan-stag-hw-insert", offload];
        self.testbed.switch.output(&offloads).unwrap();
    }

    /// Begins a state. What is captured from now on must fulfil its rule.
    fn begin(&mut self, name: &'static str, rule: Rule) {
        self.runs.push(Run { name, rule, since: now(), frames: Vec::new() });
    }

    /// Frames that the gateway's inside interface has received, to whatever address.
    fn received(&self) -> u64 {
        let counter = ["cat", "/sys/class/net/gw-in/statistics/rx_packets"];
        self.testbed.gateway.output(&counter).unwrap().trim().parse().unwrap()
    }

    /// Sends frames of every class, and asserts that they arrive.
    fn send(&mut self) {
        let seed = self.seed.wrapping_add(self.runs.len() as u64);
        let run = self.runs.last_mut().unwrap();
        run.frames = list(seed, self.macs);
        let (name, frames) = (run.name, run.frames.clone());
        let before = self.received();
        let mut sent = 0;
        let senders = &SENDERS[..if name == WITHDRAWN { 3 } else { 4 }];
        for &sender in senders {
            let of_sender = frames.iter().filter(|frame| frame.sender == sender);
            let bytes: Vec<Vec<u8>> = of_sender.map(|frame| frame.bytes.clone()).collect();
            let (host, interface) = match sender {
                Sender::Pod(pod) => (&self.testbed.pods[pod], "eth0"),
                Sender::Router => (&self.testbed.router, "to-gw"),
            };
            sent += if sender == Sender::Router { 0 } else { bytes.len() as u64 };
            host.run(move || send(interface, &bytes)).join().unwrap().unwrap();
        }
        thread::sleep(DRAIN_TIME);
        let arrived = self.received() - before;
        // The switch drops some, such as those with half a tag.
        assert!(arrived * 10 >= sent * 9, "{name}: {arrived} of {sent} frames have arrived");
        let mut sent_frames: BTreeMap<&str, u64> = CLASSES.map(|class| (class, 0)).into();
        for frame in frames.iter().filter(|frame| senders.contains(&frame.sender)) {
            *sent_frames.get_mut(frame.class).expect("a known class") += 1;
        }
        println!("{name}: {arrived} frames for {sent} sent inside; by class: {sent_frames:?}");
        let is_sent = |class: &str, count: u64| count > 0 || (name == WITHDRAWN && class == "spoofed outside");
        assert!(
            sent_frames.iter().all(|(class, count)| is_sent(class, *count)),
            "{name}: a class was never sent: {sent_frames:?}"
        );
    }

    /// Whether both interfaces have an XDP program, as shown by iproute2.
    fn is_attached(&self) -> bool {
        let show = |interface| self.testbed.gateway.output(&["ip", "-d", "link", "show", interface]).unwrap();
        INTERFACES.into_iter().all(|interface| show(interface).contains("prog/xdp"))
    }

    /// A pod's traffic is translated.
    fn check_translation(&self) {
        self.testbed.check_source_addresses(&self.testbed.pods[0], SERVER, VIP_A);
    }

    fn write_policies(&self, texts: &[String; 2]) {
        for (name, text) in POLICIES.iter().zip(texts) {
            self.testbed.write_policy(name, text);
        }
    }

    /// Whether p1 and p3 are covered, as the gateway reports.
    fn covers(&self) -> bool {
        let endpoints = self.testbed.query(&["endpoints"]).to_string();
        [0, 2].iter().all(|pod| endpoints.contains(&format!("{}\"", PODS[*pod][0])))
    }

    /// The tc guard alone: the process is suspended, and its XDP programs are detached.
    fn run_with_guard_alone(&mut self) {
        self.begin("guard", Rule::Covered);
        self.set_tags_in_frames(false);
        self.testbed.process().signal("STOP").unwrap();
        for interface in INTERFACES {
            self.testbed.gateway.ip(&["link", "set", interface, "xdp", "off"]).unwrap();
        }
        self.send();
        self.testbed.process().signal("CONT").unwrap();
        assert!(wait_for(Duration::from_secs(5), || self.is_attached()), "{}", self.testbed.log());
        assert!(self.testbed.metric("vipgate_steered_packets_total", "outcome=\"guarded\"") > 500.0);
        self.check_translation();
    }

    /// Without a policy: it was in force, and its source is accepted as empty.
    fn run_withdrawn(&mut self) {
        self.write_policies(&[String::new(), String::new()]);
        let socket = self.testbed.socket();
        let is_withdrawn = || {
            // It fails until the files are found to be empty, and if nothing is left to accept.
            self.testbed.command(&["policy", "accept-empty", "--socket", &socket]);
            !self.testbed.query(&["endpoints"]).to_string().contains("10.1.0.")
        };
        assert!(wait_for(Duration::from_secs(15), is_withdrawn), "{}", self.testbed.log());
        thread::sleep(DRAIN_TIME);
        self.begin(WITHDRAWN, Rule::All);
        self.send();
    }
}

/// Checks what was captured outside: leaks, and errors of routers inside that were translated. Returns the classes of
/// frames that have leaked in the first run.
fn check(runs: &[Run], captured: &[&[u8]], times: &[u64]) -> BTreeSet<&'static str> {
    let (mut control, mut leaks) = (BTreeSet::new(), Vec::new());
    let mut translated: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for (bytes, time) in captured.iter().zip(times) {
        let Some(index) = runs.iter().rposition(|run| run.since <= *time) else { continue };
        let run = &runs[index];
        if let Some((class, text)) = run.leak(bytes) {
            if index == 0 {
                control.insert(class);
            } else {
                leaks.push(text);
            }
        }
        for family in [0, 1].into_iter().filter(|family| is_translated_error(bytes, *family)) {
            translated.entry(run.name).or_default()[family] += 1;
        }
    }
    let described = leaks[..leaks.len().min(MAX_DESCRIBED)].join("\n");
    assert!(leaks.is_empty(), "{} leaks:\n{described}", leaks.len());
    println!("translated errors of routers inside: {translated:?}");
    for name in ["in force", "uncovered pass"] {
        let both = translated.get(name).copied().unwrap_or_default();
        assert!(both.iter().all(|count| *count > 0), "{name}: no error was translated: {both:?}");
    }
    control
}

/// Whether a frame is the error about the session that the list has opened, as the server may see it.
fn is_translated_error(frame: &[u8], family: usize) -> bool {
    let [vip, server] = [VIP_A[family], SERVER[family]].map(|text| text.parse::<IpAddr>().unwrap());
    let Some(packet) = Packet::in_frame(frame).filter(|packet| packet.addresses == [vip, server]) else { return false };
    let is_reply = |quoted: Packet<'_>| {
        quoted.addresses == [server, vip] && quoted.ports.is_some_and(|[from, _]| from == SESSION[1])
    };
    packet.quoted().is_some_and(is_reply)
}

#[test]
fn no_frame_shows_a_covered_pod_outside() {
    let started = Instant::now();
    let mut bed = Bed::new(seed());
    let captures =
        Captures::start(bed.testbed.folder.path(), "no-leak", &[(&bed.testbed.router, "to-gw".to_owned())], "");

    // The control: the kernel forwards, and all of it is seen.
    bed.begin("no gateway", Rule::All);
    bed.send();

    let policies = POLICIES.map(|name| bed.testbed.read_policy(name));
    for name in POLICIES {
        std::fs::remove_file(bed.testbed.folder.path().join("policy").join(name)).unwrap();
    }
    bed.testbed.spawn_gateway(&format!("{CLUSTER}\nxdp: {{mode: native}}"));
    let waits = || bed.testbed.log().contains("\"event\":\"no_policy\"") && bed.is_attached();
    assert!(wait_for(Duration::from_secs(20), waits), "{}", bed.testbed.log());
    bed.begin("closed", Rule::All);
    bed.send();

    bed.begin("in force", Rule::Covered);
    bed.write_policies(&policies);
    assert!(wait_for(Duration::from_secs(20), || bed.testbed.is_ready()), "{}", bed.testbed.log());
    bed.check_translation();
    bed.send();
    bed.check_translation();
    bed.run_with_guard_alone();
    bed.run_withdrawn();

    bed.begin("killed", Rule::Covered);
    bed.write_policies(&policies);
    assert!(wait_for(Duration::from_secs(15), || bed.covers()), "{}", bed.testbed.log());
    bed.check_translation();
    bed.testbed.stop("KILL");
    bed.send();

    bed.begin("uncovered pass", Rule::CoveredOnly);
    bed.testbed.start(&format!("{CLUSTER}\nuncovered: pass\nxdp: {{mode: generic}}"));
    bed.send();
    bed.check_translation();
    bed.testbed.check_frames();

    let captured = captures.end();
    let by_gateway = captured.iter().filter(|frame| frame.bytes.get(6..12) != Some(&bed.macs.router[..]));
    let (bytes, times): (Vec<&[u8]>, Vec<u64>) = by_gateway.map(|frame| (&frame.bytes[..], frame.time)).unzip();
    let control = check(&bed.runs, &bytes, &times);
    for class in FORWARDED {
        assert!(control.contains(class), "without a gateway, no frame of class {class} was seen: only {control:?}");
    }
    println!("{} packets captured outside, {:?}", bytes.len(), started.elapsed());
}
