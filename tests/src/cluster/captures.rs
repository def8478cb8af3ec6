//! Captures on several interfaces at once, merged by time.

use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use vipgate_lab::{Capture, Host};

use super::Cluster;
use crate::verifier::Frame;

/// Enough of a tunnel packet to include the inner payload's identity.
const SNAPLEN: &str = "192";

/// Running captures, one for each interface.
#[derive(Debug)]
pub struct Captures(Vec<Capture>);

impl Captures {
    /// Starts captures on interfaces of hosts.
    pub fn start(folder: &Path, name: &str, places: &[(&Host, String)], filter: &str) -> Self {
        let options = ["--time-stamp-precision=nano", "-s", SNAPLEN, "-B", "32768"];
        let start = |(index, (host, interface)): (usize, &(&Host, String))| {
            let file = folder.join(format!("{name}-{index}.pcap"));
            Capture::start(host, interface, &options, filter, &file).unwrap()
        };
        Self(places.iter().enumerate().map(start).collect())
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
    pub fn end_counted(self) -> (Vec<Frame>, u64) {
        self.0.iter().for_each(|capture| capture.interrupt().unwrap());
        let (mut frames, mut lost) = (Vec::new(), 0);
        for (index, capture) in self.0.into_iter().enumerate() {
            let (file, dropped) = capture.finish().unwrap_or_else(|error| panic!("{error}"));
            lost += dropped;
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
