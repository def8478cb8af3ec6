//! Lets the events of a plan happen to a cluster.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use vipgate::lab::Host;
use vipgate_tests::cluster::{BRIDGE, CLAIMED, Cluster, HTTP, POLICYD, pass};
use vipgate_tests::flood::{Ip, Target, Writer, send};
use vipgate_tests::policyd::{Plan as Server, Policyd};
use vipgate_tests::wait_for;

use crate::clock;
use crate::plan::{Cable, Change, Event, GATEWAYS};
use crate::resources::Resources;

/// How long routers go on sending to a dead gateway: BFD with three times 100 ms.
const DETECTED: u64 = 300;

/// A cluster to which things happen.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    pub(crate) resources: Resources,
    floods: Vec<JoinHandle<io::Result<u64>>>,
    /// Clocks of gateways and, behind them, of the policy server; none without the library.
    clocks: Vec<PathBuf>,
    library: Option<PathBuf>,
    servers: u32,
    changes: u32,
}

impl Stage {
    /// The cluster, running.
    pub(crate) fn start() -> Self {
        let mut cluster = Cluster::new("soak", GATEWAYS);
        cluster.ledger.allow_all();
        let (mut clocks, library) = (Vec::new(), clock::library());
        if let Some(library) = &library {
            clocks = (0..=GATEWAYS).map(|process| cluster.folder.path().join(format!("clock-{process}"))).collect();
            for (gateway, file) in cluster.gateways.iter_mut().zip(&clocks) {
                gateway.wrapper = clock::wrapper(library, file);
            }
        }
        // A link that goes down takes its IPv6 addresses with it; a router has them configured.
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
            gateway.launch("");
        }
        for gateway in &mut stage.cluster.gateways {
            gateway.wait_ready();
        }
        stage.cluster.wait_whole();
        stage
    }

    /// Whether clocks can be changed.
    pub(crate) fn has_clocks(&self) -> bool {
        self.library.is_some()
    }

    /// Notes memory and descriptors of all processes.
    pub(crate) fn observe(&mut self) {
        for gateway in &self.cluster.gateways {
            if let Some(pid) = gateway.pid() {
                self.resources.observe(&gateway.name, pid);
            }
        }
        if let Some(server) = &mut self.cluster.policyd {
            self.resources.observe("policyd", server.process().id());
        }
    }

    /// Names of processes that ended by themselves.
    pub(crate) fn dead(&mut self) -> Vec<String> {
        let gateways = self.cluster.gateways.iter_mut();
        let mut dead: Vec<String> = gateways.filter_map(|it| (!it.is_alive()).then(|| it.name.clone())).collect();
        if !self.cluster.policyd.as_mut().is_some_and(|server| server.process().is_alive()) {
            dead.push("policyd".into());
        }
        dead
    }

    /// Writes down beside each gateway's logs what it has in its tables and whom it has refused.
    pub(crate) fn write_tables(&self) {
        for gateway in &self.cluster.gateways {
            let mut said = String::new();
            for command in ["status", "vips", "drops", "peers"] {
                let (_, answer, complaint) = gateway.command(&[command]);
                let _ = write!(said, "$ vipgate {command}\n{answer}{complaint}\n");
            }
            let path = self.cluster.folder.path().join(format!("{}-tables.txt", gateway.name));
            if let Err(error) = fs::write(&path, said) {
                eprintln!("{}: {error}", path.display());
            }
        }
    }

    /// Waits for floods that go on; how many packets they sent.
    pub(crate) fn end_floods(&mut self) -> u64 {
        self.floods.drain(..).map(|flood| flood.join().unwrap().unwrap()).sum()
    }

    /// Waits until all gateways act by the same policy.
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
        assert!(wait_for(Duration::from_secs(10), || versions().len() == 1), "gateways have {:?}", versions());
    }

    fn start_server(&mut self) {
        self.servers += 1;
        let name = format!("policyd-{}", self.servers);
        let wrapper = match (&self.library, self.clocks.last()) {
            (Some(library), Some(file)) => clock::wrapper(library, file),
            _ => Vec::new(),
        };
        let plan = Server { name: &name, listen: POLICYD, ..Server::default() };
        let folder = self.cluster.folder.path().to_owned();
        self.cluster.policyd = Some(Policyd::start_under(&wrapper, &self.cluster.management, &folder, plan));
    }

    /// Lets one event happen, and its end.
    pub(crate) fn perform(&mut self, event: Event) {
        match event {
            Event::Kill { gateway, away } => {
                self.observe();
                self.cluster.gateways[gateway].kill();
                self.routers_notice(gateway);
                pass(away);
                self.come_back(gateway);
            }
            Event::Drain { gateway, away } => {
                self.drain(gateway);
                self.cluster.spread_over(&self.cluster.but(gateway));
                pass(200);
                self.observe();
                self.cluster.gateways[gateway].end("TERM");
                pass(away);
                self.come_back(gateway);
            }
            Event::Undrain { gateway, after } => {
                self.drain(gateway);
                pass(after);
                let (code, _, said) = self.cluster.gateways[gateway].command(&["undrain"]);
                assert_eq!(code, 0, "undrain: {said}");
                self.cluster.wait_whole();
            }
            Event::Restart { gateway } => {
                self.observe();
                self.cluster.gateways[gateway].end("TERM");
                self.cluster.gateways[gateway].launch("");
                self.routers_notice(gateway);
                self.cluster.gateways[gateway].wait_ready();
                self.back();
            }
            Event::Server { signal, away } => {
                self.observe();
                let mut server = self.cluster.policyd.take().expect("the policy server runs");
                server.process().signal(signal).unwrap();
                server.process().wait(Duration::from_secs(10)).expect("it ends");
                pass(away);
                self.start_server();
                self.cluster.wait_whole();
                self.observe();
            }
            Event::Cut { gateway, cable, time } => self.cut(gateway, cable, time),
            Event::Clock { process, seconds } => {
                if let Some(file) = self.clocks.get(process) {
                    clock::set(file, seconds);
                }
            }
            Event::Policy { tenant, change } => self.change(tenant, change),
            Event::Flood { kind, gateway, family, pps, time } => {
                let (bridge, pod) = (mac(BRIDGE), &self.cluster.pods[2]);
                let (host, interface, link, address) = if kind.is_inside() {
                    let own = pod.output(&["cat", "/sys/class/net/eth0/address"]).unwrap();
                    (pod, "eth0", [bridge, mac(own.trim())], ["10.1.0.21", "fd00:1::21"][family])
                } else {
                    let link = self.cluster.gateways[gateway].link("gw-out");
                    (&self.cluster.outside, "public", [link, bridge], CLAIMED[family])
                };
                let target = Target { link, address: Ip::of(address), ports: [HTTP; 2], only: None };
                let writer = Writer::new(kind, target, u64::from(pps));
                self.floods.push(host.run(move || send(interface, writer, pps, Duration::from_millis(time))));
            }
        }
    }

    fn drain(&self, gateway: usize) {
        let (code, said, complaint) = self.cluster.gateways[gateway].command(&["drain"]);
        assert_eq!(code, 0, "drain: {said}{complaint}");
    }

    fn routers_notice(&self, gateway: usize) {
        pass(DETECTED);
        self.cluster.spread_over(&self.cluster.but(gateway));
    }

    fn come_back(&mut self, gateway: usize) {
        self.cluster.gateways[gateway].launch("");
        self.cluster.gateways[gateway].wait_ready();
        self.back();
    }

    fn back(&mut self) {
        self.cluster.wait_whole();
        self.cluster.spread_over(&self.cluster.all());
        self.observe();
    }

    fn cut(&self, gateway: usize, cable: Cable, time: u64) {
        let number = gateway + 1;
        let carrier = |host: &Host, port: &str, state| host.ip(&["link", "set", port, state]).unwrap();
        let cluster = &self.cluster;
        let (to_gateway, port) = (format!("to-gw{number}"), format!("gw{number}"));
        match cable {
            Cable::Inside => carrier(&cluster.inside, &to_gateway, "down"),
            Cable::Outside => carrier(&cluster.outside, &port, "down"),
            Cable::OutsideSilent => cluster.outside.ip(&["link", "set", &port, "nomaster"]).unwrap(),
            Cable::Peers => cluster.cut_peers(gateway),
            Cable::Management => cluster.cut_management(gateway),
        }
        let is_data = !matches!(cable, Cable::Peers | Cable::Management);
        // Routers notice a cable of theirs; one that is put back sooner they don't.
        if is_data && time > DETECTED {
            self.routers_notice(gateway);
            pass(time - DETECTED);
        } else {
            pass(time);
        }
        match cable {
            Cable::Inside => carrier(&cluster.inside, &to_gateway, "up"),
            Cable::Outside => carrier(&cluster.outside, &port, "up"),
            Cable::OutsideSilent => cluster.outside.ip(&["link", "set", &port, "master", "public"]).unwrap(),
            Cable::Peers => cluster.heal_peers(gateway),
            Cable::Management => cluster.heal_management(gateway),
        }
        cluster.wait_whole();
        cluster.spread_over(&cluster.all());
    }

    fn change(&mut self, tenant: usize, change: Change) {
        self.changes += 1;
        let name = format!("c{tenant}.yaml");
        match change {
            Change::Add | Change::Alter => self.cluster.write_policy(&name, &manifests(tenant, self.changes)),
            Change::Break => self.cluster.write_policy(&name, "apiVersion: v1\nkind: Service\nmetadata: {name: [\n"),
            Change::Remove => fs::remove_file(self.cluster.folder.path().join("policy").join(name)).unwrap(),
        }
    }
}

fn mac(text: &str) -> [u8; 6] {
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// A tenant with a Service and endpoints that nobody plays; which ones follows from the number of the change.
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
             metadata: {{name: web-{family}, namespace: tenant-c{tenant}, labels: {{kubernetes.io/service-name: web}}}}\n\
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
