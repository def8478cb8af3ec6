//! Downloads during which a gateway is killed: complete, intact, and without a long gap.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use vipgate_lab::Host;
use vipgate_lab::download::{Download, Outcome};

use super::report::Report;
use crate::command_error::CommandError;

/// Size of a download in bytes, and bytes per second: long enough to kill a gateway during it.
pub(super) const BYTES: u64 = 32_000_000;
const RATE: u64 = 6_000_000;
/// Port of the download server.
const PORT: u16 = 7700;
/// Time from the start of a download to the kill.
pub(super) const KILL_AFTER: Duration = Duration::from_millis(1500);
/// How long routers keep sending to a dead gateway: BFD with 3 times 100 ms.
pub(super) const DETECTION_TIME: Duration = Duration::from_millis(300);
/// Limit of a download's longest gap. The lease of a dead gateway expires after 0.6 s, and TCP's retransmission backoff
/// can add as much again.
const MAX_GAP: Duration = Duration::from_secs(2);

/// Starts a download by a pod from a server's address, and checks that the server sees it with this VIP.
pub(super) fn start(
    server: &Host,
    address: &str,
    pod: &Host,
    vip: &str,
    report: &mut Report,
) -> Result<Download, CommandError> {
    let at = SocketAddr::new(address.parse::<IpAddr>().map_err(CommandError::runtime)?, PORT);
    let download = Download::start(server, at, pod, BYTES, RATE).map_err(CommandError::runtime)?;
    let seen = download.client_address();
    let observed = format!("source {}, port {}", seen.ip(), seen.port());
    report.check(&format!("{} downloads from {address}", pod.name()), seen.ip().to_string() == vip, &observed);
    Ok(download)
}

/// Waits for the end of a download and reports it; `name` distinguishes several.
pub(super) fn report(download: Download, name: &str, report: &mut Report) {
    let (is_intact, gap) = match download.finish() {
        Ok(Outcome { bytes, is_intact, checksum, longest_gap, duration }) => {
            let comparison = if is_intact { "the same" } else { "DIFFERENT" };
            let volume = format!("{} MB in {:.1} s", megabytes(bytes), duration.as_secs_f64());
            let gap = format!("{:.2} s, limit {} s", longest_gap.as_secs_f64(), MAX_GAP.as_secs());
            (
                (is_intact, format!("{volume}, {comparison} SHA-256 on both sides, {checksum:08x}..")),
                (longest_gap <= MAX_GAP, gap),
            )
        }
        Err(error) => ((false, error.to_string()), (false, "the download has failed".to_owned())),
    };
    report.check(&format!("the {name} is complete and intact"), is_intact.0, &is_intact.1);
    report.check(&format!("longest gap of the {name}"), gap.0, &gap.1);
}

/// How far a download was when its gateway was killed.
pub(super) fn progress(received: u64, age: Duration) -> String {
    format!("{:.1} s into the download, at {} of {} MB", age.as_secs_f64(), megabytes(received), megabytes(BYTES))
}

fn megabytes(bytes: u64) -> String {
    format!("{}.{}", bytes / 1_000_000, bytes / 100_000 % 10)
}
