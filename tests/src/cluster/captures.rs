//! Captures on several interfaces at once, merged by time.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use vipgate_lab::{Host, Process};

use super::Cluster;
use crate::verifier::Frame;
use crate::wait_for;

/// Enough of a tunnel packet to include the inner payload's identity.
const SNAPLEN: &str = "192";

/// Running tcpdump processes, one for each interface.
#[derive(Debug)]
pub struct Captures {
    running: Vec<(Process, PathBuf, PathBuf)>,
}

impl Captures {
    /// Starts captures on interfaces of hosts.
    pub fn start(folder: &Path, name: &str, places: &[(&Host, String)], filter: &str) -> Self {
        let start = |(index, (host, interface)): (usize, &(&Host, String))| {
            let file = folder.join(format!("{name}-{index}.pcap"));
            let log = file.with_extension("log");
            let path = file.display().to_string();
            let precision = "--time-stamp-precision=nano";
            let mut command = vec!["tcpdump", "-n", "-i", interface, precision, "-s", SNAPLEN, "-B", "32768"];
            command.extend(["-w", &path]);
            command.extend((!filter.is_empty()).then_some(filter));
            (host.spawn(&command, &log).unwrap(), file, log)
        };
        let running: Vec<_> = places.iter().enumerate().map(start).collect();
        for (_, _, log) in &running {
            let is_listening = || fs::read_to_string(log).is_ok_and(|log| log.contains("listening on"));
            assert!(wait_for(Duration::from_secs(5), is_listening), "{}", fs::read_to_string(log).unwrap());
        }
        Self { running }
    }

    /// Stops the captures. The frames of all interfaces in the order of time.
    pub fn end(self) -> Vec<Frame> {
        Self::end_all([self]).remove(0)
    }

    /// Stops several sets of captures at the same time.
    pub fn end_all<const N: usize>(captures: [Self; N]) -> Vec<Vec<Frame>> {
        // The kernel delivers packets in blocks, the last of which is up to a second late.
        thread::sleep(Duration::from_millis(1200));
        captures.into_iter().map(Self::end_now).collect()
    }

    fn end_now(self) -> Vec<Frame> {
        let (frames, lost) = self.end_counted();
        assert_eq!(lost, 0, "the capture is incomplete");
        frames
    }

    /// Stops the captures, also incomplete ones: the frames, and the number that the kernel dropped.
    pub fn end_counted(mut self) -> (Vec<Frame>, u64) {
        for (process, _, _) in &self.running {
            process.signal("INT").unwrap();
        }
        let (mut frames, mut lost) = (Vec::new(), 0);
        for (index, (process, file, log)) in self.running.iter_mut().enumerate() {
            process.wait(Duration::from_secs(10)).expect("tcpdump exits");
            let output = fs::read_to_string(&log).unwrap();
            let dropped =
                output.lines().find_map(|line| line.strip_suffix(" packets dropped by kernel")?.parse::<u64>().ok());
            lost += dropped.unwrap_or_else(|| panic!("the capture failed: {output}"));
            frames.extend(crate::verifier::read_pcap(&fs::read(file).unwrap(), index));
        }
        frames.sort_by_key(|frame| frame.time);
        (frames, lost)
    }
}

impl Cluster {
    /// Captures between the gateways and the outside router, one capture for each gateway, by index.
    pub fn capture_outside(&self, filter: &str) -> Captures {
        let places: Vec<_> = (1..=self.gateways.len()).map(|number| (&self.outside, format!("gw{number}"))).collect();
        Captures::start(self.folder_path(), "outside", &places, filter)
    }

    /// Captures between the gateways, one capture for each, by index: a packet from one to another is captured at
    /// both.
    pub fn capture_peers(&self, filter: &str) -> Captures {
        let places: Vec<_> = (1..=self.gateways.len()).map(|number| (&self.peers, format!("gw{number}"))).collect();
        Captures::start(self.folder_path(), "peers", &places, filter)
    }
}
