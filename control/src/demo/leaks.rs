//! Leak detector: captures packets that have a pod's own address where none may be seen.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use vipgate_lab::{self as lab, Host, Process};

use super::report::Report;
use super::wait_for;
use crate::command_error::CommandError;

/// A running capture.
#[derive(Debug)]
pub(super) struct LeakDetector {
    tcpdump: Process,
    capture: PathBuf,
}

impl LeakDetector {
    /// Starts capturing on an interface with a filter; returns when the capture is running.
    pub(super) fn start(host: &Host, interface: &str, filter: &str, directory: &Path) -> Result<Self, CommandError> {
        let (capture, log) = (directory.join(format!("{interface}.pcap")), directory.join(format!("{interface}.log")));
        let file = capture.display().to_string();
        // Without immediate mode, the kernel buffers packets for up to a second.
        let command = ["tcpdump", "-i", interface, "--immediate-mode", "-U", "-w", &file, filter];
        let tcpdump = host.spawn(&command, &log).map_err(CommandError::runtime)?;
        wait_for(|| fs::read_to_string(&log).is_ok_and(|log| log.contains("listening on")), "tcpdump")?;
        Ok(Self { tcpdump, capture })
    }

    /// Stops the capture and reports its packets; there should be none, as `what` says.
    pub(super) fn report(mut self, what: &str, report: &mut Report) -> Result<(), CommandError> {
        thread::sleep(Duration::from_millis(200));
        self.tcpdump.signal("INT").map_err(CommandError::runtime)?;
        self.tcpdump.wait(Duration::from_secs(3));
        let file = self.capture.display().to_string();
        let leaked = lab::output(&["tcpdump", "-n", "-r", &file]).map_err(CommandError::runtime)?;
        let count = leaked.lines().count();
        let first = leaked.lines().next().map(|packet| format!(", the first: {packet}")).unwrap_or_default();
        report.check(what, count == 0, &format!("{count} packets{first}"));
        Ok(())
    }
}
