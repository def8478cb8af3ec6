//! Captures on the link between gateway and router of the [`Testbed`].

use vipgate_lab::{Capture, IMMEDIATE};

use crate::Testbed;

impl Testbed {
    /// Starts a capture of matching packets on the link between gateway and router.
    pub fn capture(&self, filter: &str) -> Capture {
        let file = self.folder.path().join(format!("{}.pcap", filter.len()));
        Capture::start(&self.router, "to-gw", &IMMEDIATE, filter, &file).unwrap()
    }
}
