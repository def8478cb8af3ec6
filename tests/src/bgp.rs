//! BGP daemons in network namespaces: BIRD or FRR beside a gateway, with the configuration of `conf/bgp`, and BIRD as
//! the router that learns VIPs from one or several gateways.
//!
//! Each daemon has its own folder for sockets and logs; daemons of the machine are untouched.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use vipgate_lab::{Host, Process, output};

use crate::wait_for;

/// AS number of the gateways.
pub const GATEWAY_AS: u32 = 64512;
/// AS number of the routers.
pub const ROUTER_AS: u32 = 64500;
/// BGP's first connects may fail while the neighbor starts.
const BGP_TIMEOUT: Duration = Duration::from_secs(30);

/// Addresses of a gateway's two BGP sessions with a router, one for each family.
#[derive(Clone, Copy, Debug)]
pub struct PeeringAddresses<'a> {
    /// The gateway's addresses: IPv4, IPv6.
    pub gateway: [&'a str; 2],
    /// The router's addresses.
    pub router: [&'a str; 2],
}

/// Addresses of gateway and router in the [`Testbed`](crate::Testbed).
pub const DEFAULT_PEERING: PeeringAddresses<'static> =
    PeeringAddresses { gateway: ["203.0.113.1", "2001:db8:113::1"], router: ["203.0.113.254", "2001:db8:113::fe"] };

/// BIRD on a host.
#[derive(Debug)]
pub struct Bird {
    host: Host,
    socket: PathBuf,
    process: Process,
    _folder: TempDir,
}

impl Bird {
    /// Starts BIRD beside a gateway, with `conf/bgp/bird.conf`.
    pub fn gateway(host: &Host, ends: PeeringAddresses<'_>) -> Self {
        let mut text = example("bird.conf");
        let [own4, own6] = ends.gateway;
        let [router4, router6] = ends.router;
        for (name, value) in [("OWN4", own4), ("OWN6", own6), ("ROUTER4", router4), ("ROUTER6", router6)] {
            let line = text.lines().find(|line| line.starts_with(&format!("define {name} "))).unwrap().to_owned();
            text = text.replace(&line, &format!("define {name} = {value};"));
        }
        // Log to stderr, not to the machine's syslog, and connect without the default delay.
        let text = text
            .replace("log syslog all;", "log stderr all;")
            .replace("hold time 9;", "hold time 9; connect delay time 1;");
        Self::start(host, &text)
    }

    /// Starts a router that installs the routes of these gateways into its kernel, several for one VIP as one
    /// multipath route.
    pub fn router(host: &Host, gateways: &[PeeringAddresses<'_>]) -> Self {
        let mut text = format!("router id {};\nlog stderr all;\nprotocol device {{}}\n", gateways[0].router[0]);
        for family in ["ipv4", "ipv6"] {
            writeln!(text, "protocol kernel {{ {family} {{ import none; export all; }}; merge paths on limit 16; }}")
                .unwrap();
        }
        for (number, ends) in gateways.iter().enumerate() {
            for (family, (own, gateway)) in ["ipv4", "ipv6"].iter().zip(ends.router.iter().zip(ends.gateway)) {
                writeln!(
                    text,
                    "protocol bgp {family}_{number} {{ local {own} as {ROUTER_AS}; neighbor {gateway} as {GATEWAY_AS}; \
                     hold time 9; connect delay time 1; error wait time 1, 2; \
                     {family} {{ import all; export none; }}; }}"
                )
                .unwrap();
            }
        }
        Self::start(host, &text)
    }

    fn start(host: &Host, text: &str) -> Self {
        let folder = vipgate_lab::directory().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (config, socket, log) = (path("bird.conf"), path("bird.ctl"), path("bird.log"));
        fs::write(&config, text).unwrap();
        let command = ["bird", "-f", "-c", &config.display().to_string(), "-s", &socket.display().to_string()];
        let mut process = host.spawn(&command, &log).unwrap();
        let answers = || try_birdc(&socket, "show status").is_some();
        process.wait_ready(BGP_TIMEOUT, answers).unwrap_or_else(|error| panic!("{error}"));
        Self { host: host.clone(), socket, _folder: folder, process }
    }

    /// Runs `birdc`; its output.
    pub fn birdc(&self, command: &str) -> String {
        try_birdc(&self.socket, command).unwrap_or_else(|| panic!("birdc {command} failed; BIRD's log: {}", self.log()))
    }

    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Number of established BGP sessions.
    pub fn established(&self) -> usize {
        self.birdc("show protocols").lines().filter(|line| line.contains("Established")).count()
    }

    /// Waits until this many sessions are established: two for each pair of a gateway and a router.
    pub fn wait_established(&self, sessions: usize) {
        let matches = || self.established() == sessions;
        assert!(wait_for(BGP_TIMEOUT, matches), "{}\n{}", self.birdc("show protocols all"), self.log());
    }

    /// The next hops of BGP routes to an address in its host's kernel; empty without a route.
    pub fn next_hops(&self, address: &str) -> BTreeSet<String> {
        let family = if address.contains(':') { "-6" } else { "-4" };
        let routes =
            output(&["ip", "-n", self.host.netns(), family, "route", "show", "proto", "bird", address]).unwrap();
        let words: Vec<&str> = routes.split_whitespace().collect();
        words.windows(2).filter(|pair| pair[0] == "via").map(|pair| pair[1].to_owned()).collect()
    }

    /// Waits until the next hops to an address are these.
    pub fn wait_next_hops(&self, address: &str, next_hops: &[&str], timeout: Duration) {
        let expected: BTreeSet<String> = next_hops.iter().map(|&next_hop| next_hop.to_owned()).collect();
        let matches = || self.next_hops(address) == expected;
        assert!(
            wait_for(timeout, matches),
            "{address}: {:?}\n{}\n{}",
            self.next_hops(address),
            self.birdc("show route all"),
            self.log()
        );
    }
}

fn try_birdc(socket: &Path, command: &str) -> Option<String> {
    let socket = socket.display().to_string();
    let words = [&["birdc", "-r", "-s", &socket][..], &command.split(' ').collect::<Vec<_>>()].concat();
    output(&words).ok()
}

/// FRR beside a gateway: zebra and bgpd with `conf/bgp/frr.conf`, at the addresses of [`DEFAULT_PEERING`].
#[derive(Debug)]
pub struct Frr {
    _folder: TempDir,
    _processes: [Process; 2],
}

impl Frr {
    /// Starts both daemons.
    pub fn gateway(host: &Host) -> Self {
        let folder = vipgate_lab::directory().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        // FRR's daemons drop root.
        output(&["chown", "frr:frr", &folder.path().display().to_string()]).unwrap();
        let sockets = folder.path().display().to_string();
        let start = |name: &str, socket: &str, options: &[&str]| {
            let (program, log) = (format!("/usr/lib/frr/{name}"), folder.path().join(format!("{name}.log")));
            let (config, pid, zebra) = (path("none.conf"), path(&format!("{name}.pid")), path("zserv.api"));
            fs::write(&config, "").unwrap();
            let common =
                [&program, "-f", &config, "-i", &pid, "-z", &zebra, "--vty_socket", &sockets, "--log", "stdout"];
            let mut process = host.spawn(&[&common[..], &["-A", "127.0.0.1"], options].concat(), &log).unwrap();
            let socket_exists = || folder.path().join(socket).exists();
            process.wait_ready(BGP_TIMEOUT, socket_exists).unwrap_or_else(|error| panic!("{error}"));
            process
        };
        let zebra = start("zebra", "zserv.api", &["-P", "0"]);
        let bgpd = start("bgpd", "bgpd.vty", &["-P", "0"]);
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/bgp/frr.conf").display().to_string();
        output(&["vtysh", "--vty_socket", &sockets, "-f", &config]).unwrap();
        Self { _folder: folder, _processes: [zebra, bgpd] }
    }
}

fn example(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../conf/bgp").join(name)).unwrap()
}
