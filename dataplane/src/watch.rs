//! What a worker lets others see of its packets: drops by whom and with an example ([`drops`]), packets themselves while somebody
//! captures ([`tap`]), and the beginnings and ends of sessions while somebody logs them ([`log`]). None of it waits for whoever looks:
//! what finds no room is counted and left out.

pub mod drops;
pub mod glimpse;
pub mod log;
pub mod tap;

use self::drops::DropTable;
use self::log::SessionLog;
use self::tap::Tap;

/// What is seen of one worker.
#[derive(Debug, Default)]
pub struct Watch {
    /// Its drops.
    pub drops: DropTable,
    /// Whoever logs its sessions.
    pub log: SessionLog,
    /// Whoever captures.
    pub tap: Option<Box<Tap>>,
}
