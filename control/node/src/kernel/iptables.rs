//! Rules of iptables: nft doesn't list those of its legacy variant, and of others it lists marks only where iptables is
//! installed, too.

use std::process::Stdio;

use tokio::process::Command;

/// Family of the tables, as in nftables, and the program that prints them.
const PROGRAMS: [(&str, &str); 4] = [
    ("ip", "iptables-save"),
    ("ip6", "ip6tables-save"),
    ("ip", "iptables-legacy-save"),
    ("ip6", "ip6tables-legacy-save"),
];

/// Family and rules. A program that isn't there or fails has none.
pub(super) async fn rulesets() -> Vec<(&'static str, String)> {
    let mut rulesets = Vec::new();
    for (family, program) in PROGRAMS {
        let output = Command::new(program).stdin(Stdio::null()).kill_on_drop(true).output().await;
        if let Ok(output) = output
            && output.status.success()
        {
            rulesets.push((family, String::from_utf8_lossy(&output.stdout).into_owned()));
        }
    }
    rulesets
}
