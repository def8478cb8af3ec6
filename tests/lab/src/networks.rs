//! Networks that the demo and tests share: one gateway between pods and a server, and several gateways between routers.

use crate::{Error, Host, Lab, reflector};

/// The server's addresses.
pub const SERVER: [&str; 2] = ["198.51.100.10", "2001:db8:51::10"];
/// Addresses of the server of [`SingleGateway`] that policies exclude.
pub const EXCLUDED: [&str; 2] = ["10.9.0.200", "fd00:9::200"];

/// One gateway:
///
/// ```text
///   pods 10.1.0.0/24, fd00:1::/64 -- switch -- gw-in [gw] gw-out -- router -- server 198.51.100.10
/// ```
#[derive(Debug)]
pub struct SingleGateway {
    /// The switch between pods and gateway, with the bridge `pods`.
    pub switch: Host,
    pub gateway: Host,
    /// The router between gateway and server, with routes to the pods for packets that aren't translated.
    pub router: Host,
    /// The server outside; it has reflectors.
    pub server: Host,
}

impl SingleGateway {
    /// Creates hosts, links, addresses, routes; no pods. The gateway's interfaces have this many queues.
    ///
    /// # Errors
    /// When a command fails.
    pub fn build(lab: &Lab, queues: u32) -> Result<Self, Error> {
        let (switch, gateway) = (lab.host("switch", false)?, lab.host("gw", true)?);
        let router = lab.host("router", true)?;
        switch.add_bridge("pods")?;
        lab.link((&switch, "to-gw"), (&gateway, "gw-in"), queues)?;
        switch.ip(&["link", "set", "to-gw", "master", "pods"])?;
        gateway.addresses("gw-in", &["10.1.0.1/24", "fd00:1::1/64"])?;
        lab.link((&gateway, "gw-out"), (&router, "to-gw"), queues)?;
        gateway.addresses("gw-out", &["203.0.113.1/24", "2001:db8:113::1/64"])?;
        router.addresses("to-gw", &["203.0.113.254/24", "2001:db8:113::fe/64"])?;
        gateway.route("default", "203.0.113.254")?;
        gateway.route("default", "2001:db8:113::fe")?;
        router.route("10.1.0.0/24", "203.0.113.1")?;
        router.route("fd00:1::/64", "2001:db8:113::1")?;
        let server = add_server(lab, &router)?;
        router.addresses("to-server", &["10.9.0.254/24", "fd00:9::fe/64"])?;
        server.addresses("eth0", &[&format!("{}/24", EXCLUDED[0]), &format!("{}/64", EXCLUDED[1])])?;
        reflector::start(&server, &[SERVER, EXCLUDED].concat());
        Ok(Self { switch, gateway, router, server })
    }
}

/// Adds a pod with these addresses to the bridge `pods` of a host.
///
/// # Errors
/// When a command fails.
pub fn add_pod(lab: &Lab, host: &Host, name: &str, [v4, v6]: [&str; 2]) -> Result<Host, Error> {
    let pod = lab.host(name, false)?;
    lab.attach((&pod, "eth0"), (host, name), "pods")?;
    pod.addresses("eth0", &[&format!("{v4}/24"), &format!("{v6}/64")])?;
    pod.route("default", "10.1.0.1")?;
    pod.route("default", "fd00:1::1")?;
    Ok(pod)
}

/// Several gateways between two routers, and the networks between them:
///
/// ```text
///      [inside]      10.4.n.0/24
///       |  |  |
///     gw-in                     gw-peer 10.2.0.n -- [peers]
///     [gw-1] [gw-2] [gw-3] ..   gw-mgmt 10.3.0.n -- [management] 10.3.0.254
///     gw-out
///       |  |  |      203.0.113.0/24, one segment
///      [outside]
///          |
///       server       198.51.100.10
/// ```
#[derive(Debug)]
pub struct GroupNetwork {
    /// The router between pods and gateways, with the bridge `pods`.
    pub inside: Host,
    /// The router between gateways and server, with the bridge `public`.
    pub outside: Host,
    /// The switch between gateways, with the bridge `peers`.
    pub peers: Host,
    /// The host of the policy server, with the bridge `mgmt`.
    pub management: Host,
    /// The server outside; it has reflectors.
    pub server: Host,
}

impl GroupNetwork {
    /// Creates hosts, links, addresses; no pods, gateways, or routes to them.
    ///
    /// # Errors
    /// When a command fails.
    pub fn build(lab: &Lab) -> Result<Self, Error> {
        let (inside, outside) = (lab.host("inside", true)?, lab.host("outside", true)?);
        let (peers, management) = (lab.host("peers", false)?, lab.host("mgmt", false)?);
        // Traffic is asymmetric: egress via one gateway, replies via another.
        inside.disable_rp_filter()?;
        outside.disable_rp_filter()?;
        for (switch, bridge) in [(&inside, "pods"), (&outside, "public"), (&peers, "peers"), (&management, "mgmt")] {
            switch.add_bridge(bridge)?;
        }
        outside.addresses("public", &["203.0.113.254/24", "2001:db8:113::fe/64"])?;
        management.addresses("mgmt", &["10.3.0.254/24"])?;
        let server = add_server(lab, &outside)?;
        reflector::start(&server, &SERVER);
        Ok(Self { inside, outside, peers, management, server })
    }

    /// Adds the host of a gateway with its links and routes; `inside` are the networks behind the inside router.
    ///
    /// # Errors
    /// When a command fails.
    pub fn add_gateway(&self, lab: &Lab, number: usize, inside: [&str; 2]) -> Result<Host, Error> {
        let host = lab.host(&format!("gw-{number}"), true)?;
        host.disable_rp_filter()?;
        let (to_gateway, port) = (format!("to-gw{number}"), format!("gw{number}"));
        lab.link((&self.inside, &to_gateway), (&host, "gw-in"), 1)?;
        self.inside.addresses(&to_gateway, &[&format!("10.4.{number}.254/24"), &format!("fd00:4:{number}::fe/64")])?;
        lab.attach((&host, "gw-out"), (&self.outside, &port), "public")?;
        lab.attach((&host, "gw-peer"), (&self.peers, &port), "peers")?;
        lab.attach((&host, "gw-mgmt"), (&self.management, &port), "mgmt")?;
        host.addresses("gw-in", &[&format!("10.4.{number}.1/24"), &format!("fd00:4:{number}::1/64")])?;
        host.addresses("gw-out", &[&format!("203.0.113.{number}/24"), &format!("2001:db8:113::{number}/64")])?;
        host.addresses("gw-peer", &[&format!("10.2.0.{number}/24")])?;
        host.addresses("gw-mgmt", &[&format!("10.3.0.{number}/24")])?;
        host.route(inside[0], &format!("10.4.{number}.254"))?;
        host.route(inside[1], &format!("fd00:4:{number}::fe"))?;
        host.route("default", "203.0.113.254")?;
        host.route("default", "2001:db8:113::fe")?;
        Ok(host)
    }
}

/// Adds the host of a node behind the inside router of a group, `to-nodeN` there, with a link to the policy server's host.
///
/// # Errors
/// When a command fails.
pub fn add_node(lab: &Lab, inside: &Host, management: &Host, number: usize) -> Result<Host, Error> {
    let (name, uplink) = (format!("node-{number}"), format!("to-node{number}"));
    let host = lab.host(&name, true)?;
    lab.link((inside, &uplink), (&host, "eth0"), 1)?;
    inside.addresses(&uplink, &[&format!("10.5.{number}.254/24"), &format!("fd00:5:{number}::fe/64")])?;
    host.addresses("eth0", &[&format!("10.5.{number}.1/24"), &format!("fd00:5:{number}::1/64")])?;
    host.route("default", &format!("10.5.{number}.254"))?;
    host.route("default", &format!("fd00:5:{number}::fe"))?;
    lab.attach((&host, "mgmt"), (management, &name), "mgmt")?;
    host.addresses("mgmt", &[&format!("10.3.0.{}/24", 100 + number)])?;
    Ok(host)
}

/// Sets the inside router's default routes via these gateways, given by index, as BGP would: another order changes the
/// hash by which connections are spread.
///
/// # Errors
/// When a command fails.
pub fn route_inside_via(inside: &Host, gateways: &[usize]) -> Result<(), Error> {
    let [v4, v6]: [fn(usize) -> String; 2] = [|n| format!("10.4.{n}.1"), |n| format!("fd00:4:{n}::1")];
    inside.replace_route("0.0.0.0/0", &next_hops(gateways, v4))?;
    inside.replace_route("::/0", &next_hops(gateways, v6))
}

/// The same for routes of the outside router to VIPs.
///
/// # Errors
/// When a command fails.
pub fn route_outside_via(outside: &Host, vips: [&str; 2], gateways: &[usize]) -> Result<(), Error> {
    let [v4, v6]: [fn(usize) -> String; 2] = [|n| format!("203.0.113.{n}"), |n| format!("2001:db8:113::{n}")];
    outside.replace_route(vips[0], &next_hops(gateways, v4))?;
    outside.replace_route(vips[1], &next_hops(gateways, v6))
}

fn next_hops(gateways: &[usize], address: fn(usize) -> String) -> Vec<String> {
    gateways.iter().map(|index| address(index + 1)).collect()
}

/// Adds the server behind a router.
fn add_server(lab: &Lab, router: &Host) -> Result<Host, Error> {
    let server = lab.host("server", false)?;
    lab.link((router, "to-server"), (&server, "eth0"), 1)?;
    router.addresses("to-server", &["198.51.100.254/24", "2001:db8:51::fe/64"])?;
    server.addresses("eth0", &[&format!("{}/24", SERVER[0]), &format!("{}/64", SERVER[1])])?;
    server.route("default", "198.51.100.254")?;
    server.route("default", "2001:db8:51::fe")?;
    Ok(server)
}
