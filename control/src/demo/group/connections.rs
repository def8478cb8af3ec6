//! New connections of the second act: pods call out and are seen as the VIP, and a client outside calls the VIP.

use std::net::{IpAddr, SocketAddr};
use std::thread;

use super::network::{Group, VIPS};
use crate::demo::report::Report;
use crate::demo::topology::{HTTP, SERVER};
use crate::lab::Host;
use crate::lab::peers::ask_http_at;

/// Connections of each client to each address: enough that routers choose each gateway for some of them.
const EACH: usize = 8;

/// One line about all of them.
pub(super) fn check(group: &Group, report: &mut Report, what: &str) {
    let out = |pod| [0, 1].map(|family| (pod, SERVER[family], VIPS[family]));
    let inward = [0, 1].map(|family| (&group.server, VIPS[family], SERVER[family]));
    let calls: Vec<(&Host, &str, &str)> = group.pods.iter().flat_map(out).chain(inward).collect();
    // Clients side by side: one that waits for an answer in vain doesn't hold up the others.
    let wrong: Vec<String> = thread::scope(|scope| {
        let callers: Vec<_> = calls.iter().map(|call| scope.spawn(move || wrong(*call))).collect();
        callers.into_iter().flat_map(|caller| caller.join().unwrap_or_default()).collect()
    });
    let all = calls.len() * EACH;
    let told = match wrong.first() {
        None => format!("{all} of {all}: pods' as the VIP, and the server's to it"),
        Some(first) => format!("{} of {all}; {first}", all - wrong.len()),
    };
    report.line(what, wrong.is_empty(), &told);
}

/// What was wrong with a client's connections to a server, which should be seen as `expected`.
fn wrong((client, server, expected): (&Host, &str, &str)) -> Vec<String> {
    let Ok(address) = server.parse::<IpAddr>() else { return Vec::new() };
    let at = SocketAddr::new(address, HTTP);
    let ask = |_| match ask_http_at(client, at) {
        Ok(seen) if seen == expected => None,
        Ok(seen) => Some(format!("{} is {seen} for {server}", client.name())),
        Err(error) => Some(format!("{} to {server}: {error}", client.name())),
    };
    (0..EACH).filter_map(ask).collect()
}
