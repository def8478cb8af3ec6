//! Listens outside for packets that should not be there: those with a pod's own address.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::report::Report;
use super::wait_for;
use crate::failure::Failure;
use crate::lab::{self, Host, Process};

/// A capture that runs.
#[derive(Debug)]
pub(super) struct Leaks {
    tcpdump: Process,
    capture: PathBuf,
}

impl Leaks {
    /// Begins to listen on an interface for what the filter says, and returns when it does.
    pub(super) fn listen(host: &Host, interface: &str, filter: &str, folder: &Path) -> Result<Self, Failure> {
        let (capture, log) = (folder.join("outside.pcap"), folder.join("tcpdump.log"));
        let file = capture.display().to_string();
        // Without immediate mode the kernel keeps packets back for up to a second.
        let command = ["tcpdump", "-i", interface, "--immediate-mode", "-U", "-w", &file, filter];
        let tcpdump = host.spawn(&command, &log).map_err(Failure::runtime)?;
        wait_for(|| fs::read_to_string(&log).is_ok_and(|log| log.contains("listening on")), "tcpdump")?;
        Ok(Self { tcpdump, capture })
    }

    /// Ends it, and says what was heard: nothing, if all is well.
    pub(super) fn report(mut self, report: &mut Report) -> Result<(), Failure> {
        thread::sleep(Duration::from_millis(200));
        self.tcpdump.signal("INT").map_err(Failure::runtime)?;
        self.tcpdump.wait(Duration::from_secs(3));
        let file = self.capture.display().to_string();
        let leaked = lab::output(&["tcpdump", "-n", "-r", &file]).map_err(Failure::runtime)?;
        let count = leaked.lines().count();
        let first = leaked.lines().next().map(|packet| format!(", the first: {packet}")).unwrap_or_default();
        report.line("no pod's address was seen outside", count == 0, &format!("{count} packets{first}"));
        Ok(())
    }
}
