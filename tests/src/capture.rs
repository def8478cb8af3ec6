//! Captures on the link between gateway and router of the [`Testbed`](crate::Testbed).

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, thread};

use vipgate_lab::Process;

use crate::{Testbed, wait_for};

/// Length of a pcap file without packets.
const FILE_HEADER: u64 = 24;

impl Testbed {
    /// Starts a capture of matching packets on the link between gateway and router.
    pub fn capture(&self, filter: &str) -> Capture {
        let file = self.folder.path().join(format!("{}.pcap", filter.len()));
        let log = file.with_extension("log");
        // Without immediate mode the kernel buffers packets for up to a second, and they would be lost at the end.
        let command = ["tcpdump", "-i", "to-gw", "--immediate-mode", "-U", "-w", &file.display().to_string(), filter];
        let process = self.router.spawn(&command, &log).unwrap();
        let is_listening = || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening on"));
        assert!(wait_for(Duration::from_secs(5), is_listening), "tcpdump did not start");
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
    /// Whether it has captured no packet so far.
    pub fn is_empty(&self) -> bool {
        fs::metadata(&self.file).is_ok_and(|file| file.len() <= FILE_HEADER)
    }

    /// Stops the capture; returns a line for each packet.
    pub fn end(mut self) -> Vec<String> {
        thread::sleep(Duration::from_millis(300));
        self.process.signal("INT").unwrap();
        self.process.wait(Duration::from_secs(3));
        let text = vipgate_lab::output(&["tcpdump", "-n", "-r", &self.file.display().to_string()]).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}
