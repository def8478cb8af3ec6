//! New connections through a group of gateways: egress from pods with the VIP as source, and inbound to the VIP.

use std::net::{IpAddr, SocketAddr};
use std::thread;

use vipgate_lab::Host;
use vipgate_lab::networks::SERVER;
use vipgate_lab::reflector::query_http_at;

use super::report::Report;
use super::topology::HTTP;

/// Connections of each client to each address: enough for ECMP to use each gateway.
const PER_PAIR: usize = 8;

/// Reports one line about all connections.
pub(super) fn check(pods: &[Host], server: &Host, vips: [&str; 2], report: &mut Report, what: &str) {
    let egress = |pod| [0, 1].map(|family| (pod, SERVER[family], vips[family]));
    let inbound = [0, 1].map(|family| (server, vips[family], SERVER[family]));
    let pairs: Vec<(&Host, &str, &str)> = pods.iter().flat_map(egress).chain(inbound).collect();
    // In parallel: a timeout of one client doesn't delay the others.
    let errors: Vec<String> = thread::scope(|scope| {
        let clients: Vec<_> = pairs.iter().map(|pair| scope.spawn(move || errors(*pair))).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap_or_default()).collect()
    });
    let all = pairs.len() * PER_PAIR;
    let observed = match errors.first() {
        None => format!("{all} of {all}: from pods with the VIP as source, and from the server to the VIP"),
        Some(first) => format!("{} of {all}; the first error: {first}", all - errors.len()),
    };
    report.check(what, errors.is_empty(), &observed);
}

/// Errors of a client's connections to a server, whose source address should be `expected`.
fn errors((client, server, expected): (&Host, &str, &str)) -> Vec<String> {
    let Ok(address) = server.parse::<IpAddr>() else { return Vec::new() };
    let at = SocketAddr::new(address, HTTP);
    let connect = |_| match query_http_at(client, at) {
        Ok(seen) if seen == expected => None,
        Ok(seen) => Some(format!("{} has source {seen} at {server}", client.name())),
        Err(error) => Some(format!("{} to {server}: {error}", client.name())),
    };
    (0..PER_PAIR).filter_map(connect).collect()
}
