//! Leak detector: captures packets that have a pod's own address where none may be seen.

use std::path::Path;

use vipgate_lab::{Capture, Host, IMMEDIATE};

use super::report::Report;
use crate::command_error::CommandError;

/// A running capture.
#[derive(Debug)]
pub(super) struct LeakDetector(Capture);

impl LeakDetector {
    /// Starts capturing on an interface with a filter; returns when the capture is running.
    pub(super) fn start(host: &Host, interface: &str, filter: &str, directory: &Path) -> Result<Self, CommandError> {
        let file = directory.join(format!("{interface}.pcap"));
        Capture::start(host, interface, &IMMEDIATE, filter, &file).map(Self).map_err(CommandError::runtime)
    }

    /// Stops the capture and reports its packets; there should be none, as `what` says.
    pub(super) fn report(self, what: &str, report: &mut Report) -> Result<(), CommandError> {
        let leaked = self.0.end().map_err(CommandError::runtime)?;
        let first = leaked.first().map(|packet| format!(", the first: {packet}")).unwrap_or_default();
        report.check(what, leaked.is_empty(), &format!("{} packets{first}", leaked.len()));
        Ok(())
    }
}
