//! Runs scheduled events on a cluster.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, io};

use vipgate_lab::Host;
use vipgate_tests::cluster::{BRIDGE_MAC, Cluster, HTTP_PORT, L2_VIPS, POLICYD_ADDRESS, sleep_ms};
use vipgate_tests::flood::{FloodKind, FloodTarget, Ip, PacketWriter, send};
use vipgate_tests::policyd::{Policyd, PolicydConfig as Server};
use vipgate_tests::soak::schedule::{GATEWAYS, Link, PolicyChange, SoakEvent};
use vipgate_tests::wait_for;

use crate::clock;
use crate::resources::Resources;

/// Time until routers detect a dead gateway, milliseconds: BFD with three times 100 ms.
const BFD_DETECTION: u64 = 300;

/// The soak's cluster.
#[derive(Debug)]
pub(crate) struct SoakCluster {
    pub(crate) cluster: Cluster,
    pub(crate) resources: Resources,
    floods: Vec<JoinHandle<io::Result<u64>>>,
    /// Clock files of the gateways, then that of the policy server; empty without the library.
    clocks: Vec<PathBuf>,
    library: Option<PathBuf>,
    servers: u32,
    changes: u32,
}

impl SoakCluster {
    /// Starts the cluster.
    pub(crate) fn start() -> Self {
        let mut cluster = Cluster::new("soak", GATEWAYS);
        cluster.accounting.allow_all();
        let (mut clocks, library) = (Vec::new(), clock::library());
        if let Some(library) = &library {
            clocks = (0..=GATEWAYS).map(|process| cluster.folder.path().join(format!("clock-{process}"))).collect();
            for (gateway, file) in cluster.gateways.iter_mut().zip(&clocks) {
                gateway.wrapper = clock::wrapper(library, file);
            }
        }
        // An interface that goes down loses its IPv6 addresses by default; a router keeps its configured ones.
        for scope in ["all", "default"] {
            cluster.inside.sysctl(&format!("net.ipv6.conf.{scope}.keep_addr_on_down"), 1).unwrap();
        }
        let mut stage = Self {
            cluster,
            resources: Resources::default(),
            floods: Vec::new(),
            clocks,
            library,
            servers: 0,
            changes: 0,
        };
        stage.start_server();
        for gateway in &mut stage.cluster.gateways {
            gateway.spawn("");
        }
        for gateway in &mut stage.cluster.gateways {
            gateway.wait_ready();
        }
        stage.cluster.wait_converged();
        stage
    }

    /// Whether clock jumps are possible.
    pub(crate) fn has_clocks(&self) -> bool {
        self.library.is_some()
    }

    /// Samples memory and descriptors of all processes.
    pub(crate) fn sample_resources(&mut self) {
        for gateway in &self.cluster.gateways {
            if let Some(pid) = gateway.pid() {
                self.resources.observe(&gateway.name, pid);
            }
        }
        if let Some(server) = &mut self.cluster.policyd {
            self.resources.observe("policyd", server.process().id());
        }
    }

    /// Names of processes that exited on their own.
    pub(crate) fn exited_processes(&mut self) -> Vec<String> {
        let gateways = self.cluster.gateways.iter_mut();
        let mut exited: Vec<String> = gateways.filter_map(|it| (!it.is_alive()).then(|| it.name.clone())).collect();
        if !self.cluster.policyd.as_mut().is_some_and(|server| server.process().is_alive()) {
            exited.push("policyd".into());
        }
        exited
    }

    /// Writes the output of status commands beside each gateway's logs.
    pub(crate) fn dump_state(&self) {
        for gateway in &self.cluster.gateways {
            let mut output = String::new();
            for command in ["status", "vips", "drops", "peers"] {
                let (_, stdout, stderr) = gateway.command(&[command]);
                let _ = write!(output, "$ vipgate {command}\n{stdout}{stderr}\n");
            }
            let path = self.cluster.folder.path().join(format!("{}-tables.txt", gateway.name));
            if let Err(error) = fs::write(&path, output) {
                eprintln!("{}: {error}", path.display());
            }
        }
    }

    /// Waits for running floods; returns the number of packets that they sent.
    pub(crate) fn end_floods(&mut self) -> u64 {
        self.floods.drain(..).map(|flood| flood.join().unwrap().unwrap()).sum()
    }

    /// Waits until all gateways have the same policy version.
    pub(crate) fn check_policy(&self) {
        let versions = || {
            let version = |text: String| {
                text.lines()
                    .find(|line| line.starts_with("vipgate_policy_version_info{"))
                    .unwrap_or_default()
                    .to_owned()
            };
            let mut all: Vec<String> = self.cluster.gateways.iter().map(|gateway| version(gateway.metrics())).collect();
            all.dedup();
            all
        };
        assert!(
            wait_for(Duration::from_secs(10), || versions().len() == 1),
            "policy versions differ: {:?}",
            versions()
        );
    }

    fn start_server(&mut self) {
        self.servers += 1;
        let name = format!("policyd-{}", self.servers);
        let wrapper = match (&self.library, self.clocks.last()) {
            (Some(library), Some(file)) => clock::wrapper(library, file),
            _ => Vec::new(),
        };
        let config = Server { name: &name, listen: POLICYD_ADDRESS, ..Server::default() };
        let folder = self.cluster.folder.path().to_owned();
        self.cluster.policyd = Some(Policyd::start_with_wrapper(&wrapper, &self.cluster.management, &folder, config));
    }

    /// Runs an event to its end.
    pub(crate) fn run_event(&mut self, event: SoakEvent) {
        match event {
            SoakEvent::Kill { gateway, downtime } => {
                self.sample_resources();
                self.cluster.gateways[gateway].kill();
                self.reroute_after_detection(gateway);
                sleep_ms(downtime);
                self.start_gateway(gateway);
            }
            SoakEvent::Drain { gateway, downtime } => {
                self.drain(gateway);
                self.cluster.route_via(&self.cluster.indices_except(gateway));
                sleep_ms(200);
                self.sample_resources();
                self.cluster.gateways[gateway].stop("TERM");
                sleep_ms(downtime);
                self.start_gateway(gateway);
            }
            SoakEvent::Undrain { gateway, after } => {
                self.drain(gateway);
                sleep_ms(after);
                let (code, _, stderr) = self.cluster.gateways[gateway].command(&["undrain"]);
                assert_eq!(code, 0, "undrain: {stderr}");
                self.cluster.wait_converged();
            }
            SoakEvent::Restart { gateway } => {
                self.sample_resources();
                self.cluster.gateways[gateway].stop("TERM");
                self.cluster.gateways[gateway].spawn("");
                self.reroute_after_detection(gateway);
                self.cluster.gateways[gateway].wait_ready();
                self.restore_routes();
            }
            SoakEvent::Server { signal, downtime } => self.restart_server(signal, downtime),
            SoakEvent::Cut { gateway, link, time } => self.cut(gateway, link, time),
            SoakEvent::Clock { process, seconds } => {
                if let Some(file) = self.clocks.get(process) {
                    clock::set(file, seconds);
                }
            }
            SoakEvent::Policy { tenant, change } => self.change(tenant, change),
            SoakEvent::Flood { kind, gateway, family, pps, time } => {
                let flood = self.start_flood(kind, gateway, family, pps, Duration::from_millis(time));
                self.floods.push(flood);
            }
        }
    }

    /// Stops the policy server with a signal, and starts it again after `downtime` milliseconds.
    fn restart_server(&mut self, signal: &str, downtime: u64) {
        self.sample_resources();
        let mut server = self.cluster.policyd.take().expect("the policy server runs");
        server.process().signal(signal).unwrap();
        server.process().wait(Duration::from_secs(10)).expect("the policy server exits");
        sleep_ms(downtime);
        self.start_server();
        self.cluster.wait_converged();
        self.sample_resources();
    }

    /// Floods tenant B's addresses via a gateway, in a thread of its own.
    fn start_flood(
        &self,
        kind: FloodKind,
        gateway: usize,
        family: usize,
        pps: u32,
        time: Duration,
    ) -> JoinHandle<io::Result<u64>> {
        let (bridge, pod) = (parse_mac(BRIDGE_MAC), &self.cluster.pods[2]);
        let (host, interface, macs, address) = if kind.is_inside() {
            let own = pod.output(&["cat", "/sys/class/net/eth0/address"]).unwrap();
            (pod, "eth0", [bridge, parse_mac(own.trim())], ["10.1.0.21", "fd00:1::21"][family])
        } else {
            let gateway_mac = self.cluster.gateways[gateway].mac("gw-out");
            (&self.cluster.outside, "public", [gateway_mac, bridge], L2_VIPS[family])
        };
        let target = FloodTarget { macs, address: Ip::parse(address), ports: [HTTP_PORT; 2] };
        let writer = PacketWriter::new(kind, target, u64::from(pps));
        host.run(move || send(interface, writer, pps, time))
    }

    fn drain(&self, gateway: usize) {
        let (code, stdout, stderr) = self.cluster.gateways[gateway].command(&["drain"]);
        assert_eq!(code, 0, "drain: {stdout}{stderr}");
    }

    fn reroute_after_detection(&self, gateway: usize) {
        sleep_ms(BFD_DETECTION);
        self.cluster.route_via(&self.cluster.indices_except(gateway));
    }

    fn start_gateway(&mut self, gateway: usize) {
        self.cluster.gateways[gateway].spawn("");
        self.cluster.gateways[gateway].wait_ready();
        self.restore_routes();
    }

    fn restore_routes(&mut self) {
        self.cluster.wait_converged();
        self.cluster.route_via(&self.cluster.indices());
        self.sample_resources();
    }

    fn cut(&self, gateway: usize, link: Link, time: u64) {
        let number = gateway + 1;
        let set_link = |host: &Host, port: &str, state| host.ip(&["link", "set", port, state]).unwrap();
        let cluster = &self.cluster;
        let (to_gateway, port) = (format!("to-gw{number}"), format!("gw{number}"));
        match link {
            Link::Inside => set_link(&cluster.inside, &to_gateway, "down"),
            Link::Outside => set_link(&cluster.outside, &port, "down"),
            Link::OutsideSilent => cluster.outside.ip(&["link", "set", &port, "nomaster"]).unwrap(),
            Link::Peers => cluster.cut_peers(gateway),
            Link::Management => cluster.cut_management(gateway),
        }
        let is_data = !matches!(link, Link::Peers | Link::Management);
        // Routers detect a failure of their own links, unless it is shorter than the detection time.
        if is_data && time > BFD_DETECTION {
            self.reroute_after_detection(gateway);
            sleep_ms(time - BFD_DETECTION);
        } else {
            sleep_ms(time);
        }
        match link {
            Link::Inside => set_link(&cluster.inside, &to_gateway, "up"),
            Link::Outside => set_link(&cluster.outside, &port, "up"),
            Link::OutsideSilent => cluster.outside.ip(&["link", "set", &port, "master", "public"]).unwrap(),
            Link::Peers => cluster.heal_peers(gateway),
            Link::Management => cluster.heal_management(gateway),
        }
        cluster.wait_converged();
        cluster.route_via(&cluster.indices());
    }

    fn change(&mut self, tenant: usize, change: PolicyChange) {
        self.changes += 1;
        let name = format!("c{tenant}.yaml");
        match change {
            PolicyChange::Add | PolicyChange::Alter => {
                self.cluster.write_policy(&name, &manifests(tenant, self.changes));
            }
            PolicyChange::Break => {
                self.cluster.write_policy(&name, "apiVersion: v1\nkind: Service\nmetadata: {name: [\n");
            }
            PolicyChange::Remove => fs::remove_file(self.cluster.folder.path().join("policy").join(name)).unwrap(),
        }
    }
}

fn parse_mac(text: &str) -> [u8; 6] {
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// A tenant with a Service and endpoints without hosts; the endpoints depend on the number of the change.
fn manifests(tenant: usize, change: u32) -> String {
    let mut text = format!(
        "apiVersion: v1\nkind: Namespace\nmetadata: {{name: tenant-c{tenant}}}\n\
         ---\napiVersion: v1\nkind: Service\n\
         metadata: {{name: web, namespace: tenant-c{tenant}, annotations: {{vipgate.io/egress: \"true\"}}}}\n\
         spec:\n  type: LoadBalancer\n  ports: [{{name: tcp, port: 80, targetPort: 8080, protocol: TCP}}]\n\
         status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.{}}}, {{ip: \"2001:db8:2::{}\"}}]}}}}\n",
        tenant + 1,
        tenant + 1
    );
    for (family, name) in ["IPv4", "IPv6"].into_iter().enumerate() {
        let _ = write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: web-{family}, namespace: tenant-c{tenant}, \
             labels: {{kubernetes.io/service-name: web}}}}\n\
             addressType: {name}\nports: [{{name: tcp, port: 8080}}]\nendpoints:\n"
        );
        for endpoint in 0..=change % 20 {
            let host = 1 + (change + endpoint) % 50;
            let address = [format!("10.1.{}.{host}", 10 + tenant), format!("fd00:1::{}:{host}", 10 + tenant)];
            let _ = writeln!(text, "  - {{addresses: [\"{}\"], conditions: {{ready: true}}}}", address[family]);
        }
    }
    text
}
