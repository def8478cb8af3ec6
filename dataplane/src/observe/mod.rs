//! Observation of a worker's packets: drop statistics ([`drops`]), packet capture ([`capture`]) and the session log
//! ([`session_log`]). The packet path never waits for a reader: what finds no space is counted and discarded.

pub mod address_conflict;
pub mod capture;
pub mod counters;
pub mod drops;
pub mod packet_summary;
pub mod session_log;

use self::capture::Capture;
use self::drops::DropStats;
use self::session_log::SessionLog;

/// The observers of one worker.
#[derive(Debug, Default)]
pub struct Observer {
    /// Drop statistics.
    pub drops: DropStats,
    pub session_log: SessionLog,
    /// The running capture.
    pub capture: Option<Box<Capture>>,
}
