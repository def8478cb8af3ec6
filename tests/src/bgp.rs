//! BGP daemons in network namespaces: BIRD or FRR beside a gateway, as `conf/bgp` has them, and BIRD as the router that
//! hears of VIPs from one gateway or from several.
//!
//! Each has its own folder for sockets and logs; nothing of the machine's own daemons is touched.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use vipgate::lab::{Host, Process, output};

use crate::wait_for;

/// The AS of gateways and that of routers.
pub const GATEWAYS: u32 = 64512;
/// The AS of routers.
pub const ROUTERS: u32 = 64500;
/// BGP's first attempts may fail while the other side starts.
const PATIENCE: Duration = Duration::from_secs(30);

/// The two ends of a gateway's sessions with a router, one for each family.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// The gateway's addresses: IPv4, IPv6.
    pub gateway: [&'a str; 2],
    /// The router's.
    pub router: [&'a str; 2],
}

/// Those of the world in which most tests are.
pub const ENDS: Ends<'static> =
    Ends { gateway: ["203.0.113.1", "2001:db8:113::1"], router: ["203.0.113.254", "2001:db8:113::fe"] };

/// BIRD on a host.
#[derive(Debug)]
pub struct Bird {
    host: Host,
    socket: PathBuf,
    folder: TempDir,
    _process: Process,
}

impl Bird {
    /// Beside a gateway, with `conf/bgp/bird.conf`.
    pub fn gateway(host: &Host, ends: Ends<'_>) -> Self {
        let mut text = example("bird.conf");
        let [own4, own6] = ends.gateway;
        let [router4, router6] = ends.router;
        for (name, value) in [("OWN4", own4), ("OWN6", own6), ("ROUTER4", router4), ("ROUTER6", router6)] {
            let line = text.lines().find(|line| line.starts_with(&format!("define {name} "))).unwrap().to_owned();
            text = text.replace(&line, &format!("define {name} = {value};"));
        }
        // Not for the machine's own log, and not slower than a test likes to wait.
        let text = text
            .replace("log syslog all;", "log stderr all;")
            .replace("hold time 9;", "hold time 9; connect delay time 1;");
        Self::start(host, &text)
    }

    /// A router that takes routes from these gateways into its kernel: several for one VIP become one route of several paths.
    pub fn router(host: &Host, gateways: &[Ends<'_>]) -> Self {
        let mut text = format!("router id {};\nlog stderr all;\nprotocol device {{}}\n", gateways[0].router[0]);
        for family in ["ipv4", "ipv6"] {
            writeln!(text, "protocol kernel {{ {family} {{ import none; export all; }}; merge paths on limit 16; }}")
                .unwrap();
        }
        for (number, ends) in gateways.iter().enumerate() {
            for (family, (own, gateway)) in ["ipv4", "ipv6"].iter().zip(ends.router.iter().zip(ends.gateway)) {
                writeln!(
                    text,
                    "protocol bgp {family}_{number} {{ local {own} as {ROUTERS}; neighbor {gateway} as {GATEWAYS}; \
                     hold time 9; connect delay time 1; error wait time 1, 2; {family} {{ import all; export none; }}; }}"
                )
                .unwrap();
            }
        }
        Self::start(host, &text)
    }

    fn start(host: &Host, text: &str) -> Self {
        let folder = TempDir::with_prefix("vipgate-bird-").unwrap();
        let place = |name: &str| folder.path().join(name);
        let (config, socket, log) = (place("bird.conf"), place("bird.ctl"), place("bird.log"));
        fs::write(&config, text).unwrap();
        let command = ["bird", "-f", "-c", &config.display().to_string(), "-s", &socket.display().to_string()];
        let process = host.spawn(&command, &log).unwrap();
        let bird = Self { host: host.clone(), socket, folder, _process: process };
        assert!(wait_for(PATIENCE, || bird.try_ask("show status").is_some()), "BIRD does not start: {}", bird.log());
        bird
    }

    /// What `birdc` says.
    pub fn ask(&self, command: &str) -> String {
        self.try_ask(command).unwrap_or_else(|| panic!("birdc {command} failed; BIRD said: {}", self.log()))
    }

    fn try_ask(&self, command: &str) -> Option<String> {
        let socket = self.socket.display().to_string();
        let words = [&["birdc", "-r", "-s", &socket][..], &command.split(' ').collect::<Vec<_>>()].concat();
        output(&words).ok()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("bird.log")).unwrap_or_default()
    }

    /// How many of its sessions are established.
    pub fn established(&self) -> usize {
        self.ask("show protocols").lines().filter(|line| line.contains("Established")).count()
    }

    /// Waits until so many sessions are established: two for each pair of a gateway and a router.
    pub fn wait_established(&self, sessions: usize) {
        let so = || self.established() == sessions;
        assert!(wait_for(PATIENCE, so), "{}\n{}", self.ask("show protocols all"), self.log());
    }

    /// The next hops to an address in its host's kernel, as far as BGP has put them there; none: BGP knows no way.
    pub fn paths(&self, address: &str) -> BTreeSet<String> {
        let family = if address.contains(':') { "-6" } else { "-4" };
        let routes =
            output(&["ip", "-n", self.host.netns(), family, "route", "show", "proto", "bird", address]).unwrap();
        let words: Vec<&str> = routes.split_whitespace().collect();
        words.windows(2).filter(|pair| pair[0] == "via").map(|pair| pair[1].to_owned()).collect()
    }

    /// Waits until these are the paths to an address.
    pub fn wait_paths(&self, address: &str, paths: &[&str], patience: Duration) {
        let wanted: BTreeSet<String> = paths.iter().map(|&path| path.to_owned()).collect();
        let so = || self.paths(address) == wanted;
        assert!(
            wait_for(patience, so),
            "{address}: {:?}\n{}\n{}",
            self.paths(address),
            self.ask("show route all"),
            self.log()
        );
    }
}

/// FRR beside a gateway: zebra and bgpd with `conf/bgp/frr.conf`, in the world of [`ENDS`].
#[derive(Debug)]
pub struct Frr {
    _folder: TempDir,
    _processes: [Process; 2],
}

impl Frr {
    /// Starts both.
    pub fn gateway(host: &Host) -> Self {
        let folder = TempDir::with_prefix("vipgate-frr-").unwrap();
        let place = |name: &str| folder.path().join(name).display().to_string();
        // FRR's daemons give up root.
        output(&["chown", "frr:frr", &folder.path().display().to_string()]).unwrap();
        let sockets = folder.path().display().to_string();
        let start = |name: &str, socket: &str, options: &[&str]| {
            let (program, log) = (format!("/usr/lib/frr/{name}"), folder.path().join(format!("{name}.log")));
            let (config, pid, zebra) = (place("none.conf"), place(&format!("{name}.pid")), place("zserv.api"));
            fs::write(&config, "").unwrap();
            let common =
                [&program, "-f", &config, "-i", &pid, "-z", &zebra, "--vty_socket", &sockets, "--log", "stdout"];
            let process = host.spawn(&[&common[..], &["-A", "127.0.0.1"], options].concat(), &log).unwrap();
            let stands = || folder.path().join(socket).exists();
            assert!(wait_for(PATIENCE, stands), "{name}: {}", fs::read_to_string(&log).unwrap_or_default());
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
