//! Captures by tcpdump.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use crate::command::{Error, output};
use crate::host::Host;
use crate::process::Process;

/// Options for captures of which each packet is in the file at once: otherwise the kernel buffers packets for up to a
/// second, and they would be lost at the end.
pub const IMMEDIATE: [&str; 2] = ["--immediate-mode", "-U"];
/// Time for packets to arrive before the end of a capture.
const DRAIN_TIME: Duration = Duration::from_millis(300);
const START_TIMEOUT: Duration = Duration::from_secs(5);
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// Length of a pcap file without packets.
const FILE_HEADER: u64 = 24;

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    /// Starts to capture packets at an interface that match a filter, into a file; returns when it captures.
    ///
    /// # Errors
    /// When tcpdump doesn't start.
    pub fn start(host: &Host, interface: &str, options: &[&str], filter: &str, file: &Path) -> Result<Self, Error> {
        let path = file.display().to_string();
        let mut command = vec!["tcpdump", "-n", "-i", interface, "-w", path.as_str()];
        command.extend(options);
        command.extend((!filter.is_empty()).then_some(filter));
        let mut tcpdump = host.spawn(&command, &file.with_extension("log"))?;
        tcpdump.wait_for_log("listening on", START_TIMEOUT)?;
        Ok(Self { tcpdump, file: file.to_owned() })
    }

    /// Whether it has captured no packet so far.
    pub fn is_empty(&self) -> bool {
        fs::metadata(&self.file).is_ok_and(|file| file.len() <= FILE_HEADER)
    }

    /// Tells tcpdump to end.
    ///
    /// # Errors
    /// When it has ended.
    pub fn interrupt(&self) -> Result<(), Error> {
        self.tcpdump.signal("INT")
    }

    /// Waits until tcpdump has ended; the file, and the number of packets that the kernel dropped.
    ///
    /// # Errors
    /// When the capture has failed.
    pub fn finish(mut self) -> Result<(PathBuf, u64), Error> {
        self.tcpdump.wait(END_TIMEOUT);
        let log = self.tcpdump.log();
        let dropped =
            log.lines().find_map(|line| line.strip_suffix(" dropped by kernel")?.split(' ').next()?.parse().ok());
        let dropped = dropped.ok_or_else(|| Error::Failed { command: "tcpdump".to_owned(), output: log.clone() })?;
        Ok((self.file, dropped))
    }

    /// Ends the capture; a line for each packet.
    ///
    /// # Errors
    /// When the capture has failed.
    pub fn end(self) -> Result<Vec<String>, Error> {
        thread::sleep(DRAIN_TIME);
        self.interrupt()?;
        let (file, _) = self.finish()?;
        let text = output(&["tcpdump", "-n", "-r", &file.display().to_string()])?;
        Ok(text.lines().map(str::to_owned).collect())
    }
}
