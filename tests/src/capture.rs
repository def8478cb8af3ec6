//! Captures on the link between gateway and router.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use vipgate::lab::Process;

use crate::{World, wait_for};

impl World {
    /// Begins to count packets that match on the link between gateway and router.
    pub fn capture(&self, filter: &str) -> Capture {
        let file = self.folder.path().join(format!("{}.pcap", filter.len()));
        let log = file.with_extension("log");
        // Without immediate mode the kernel keeps packets back for up to a second, and the end of the capture loses them.
        let command = ["tcpdump", "-i", "to-gw", "--immediate-mode", "-U", "-w", &file.display().to_string(), filter];
        let process = self.router.spawn(&command, &log).unwrap();
        let listens = || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening on"));
        assert!(wait_for(Duration::from_secs(5), listens), "tcpdump did not start");
        Capture { process, file }
    }
}

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    process: Process,
    file: PathBuf,
}

impl Capture {
    /// Ends it; the packets, a line each.
    pub fn end(mut self) -> Vec<String> {
        thread::sleep(Duration::from_millis(300));
        self.process.signal("INT").unwrap();
        self.process.wait(Duration::from_secs(3));
        let text = vipgate::lab::output(&["tcpdump", "-n", "-r", &self.file.display().to_string()]).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}
