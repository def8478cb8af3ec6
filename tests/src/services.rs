//! Echo Service of the tests: manifests, backends that return their name and the client address that they see, and
//! clients.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use vipgate_lab::Host;

use crate::Testbed;

/// VIPs of the [`EchoService`], used by nothing else.
pub const VIP: [&str; 2] = ["203.0.113.30", "2001:db8:113::30"];
pub const TCP_PORT: u16 = 80;
pub const UDP_PORT: u16 = 53;
/// Listen port of the backends, TCP and UDP.
pub const BACKEND_PORT: u16 = 9000;
/// Its health check node port.
pub const HEALTH_CHECK_PORT: u16 = 30_030;

/// Timeout of connects and replies.
const REPLY_TIMEOUT: Duration = Duration::from_secs(3);

/// A backend in a manifest.
#[derive(Clone, Debug)]
pub struct Backend {
    address: String,
    conditions: &'static str,
    node: &'static str,
}

pub fn ready_backend(address: &str) -> Backend {
    Backend { address: address.to_owned(), conditions: "{ready: true}", node: "node-1" }
}

/// A terminating backend that still serves.
pub fn terminating_backend(address: &str) -> Backend {
    Backend { conditions: "{ready: false, serving: true, terminating: true}", ..ready_backend(address) }
}

impl Backend {
    /// The same on another node.
    #[must_use]
    pub fn on_node(self, node: &'static str) -> Self {
        Self { node, ..self }
    }
}

/// The Service `served/echo` at [`VIP`].
#[derive(Clone, Debug, Default)]
pub struct EchoService<'a> {
    /// Additional lines of its spec.
    pub spec: &'a str,
    /// Additional lines of its metadata.
    pub metadata: &'a str,
    /// Its backends, of either family.
    pub backends: &'a [Backend],
}

impl EchoService<'_> {
    pub fn manifest(&self) -> String {
        let Self { spec, metadata, backends } = self;
        let mut text = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: echo\n  namespace: served\n{metadata}\
             spec:\n  type: LoadBalancer\n{spec}\n  ports:\n\
             \x20   - {{name: tcp, port: {TCP_PORT}, targetPort: {BACKEND_PORT}, protocol: TCP}}\n\
             \x20   - {{name: udp, port: {UDP_PORT}, targetPort: {BACKEND_PORT}, protocol: UDP}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
            VIP[0], VIP[1]
        );
        for (family, name) in [("IPv4", "echo-4"), ("IPv6", "echo-6")] {
            let of_family = backends.iter().filter(|backend| backend.address.contains(':') == (family == "IPv6"));
            let endpoints = of_family.map(|Backend { address, conditions, node }| {
                // Both addresses of a pod end with its number.
                let pod = address.rsplit(['.', ':']).next().unwrap_or_default();
                format!(
                    "  - {{addresses: [\"{address}\"], conditions: {conditions}, nodeName: {node}, \
                     targetRef: {{kind: Pod, name: pod-{pod}}}}}\n"
                )
            });
            // Writing to a String can't fail.
            let _ = write!(
                text,
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{name: {name}, namespace: served, labels: {{kubernetes.io/service-name: echo}}}}\n\
                 addressType: {family}\n\
                 ports: [{{name: tcp, port: {BACKEND_PORT}}}, {{name: udp, port: {BACKEND_PORT}, protocol: UDP}}]\n\
                 endpoints:\n{}",
                endpoints.collect::<String>()
            );
            if text.ends_with("endpoints:\n") {
                text.truncate(text.len() - 1);
                text.push_str(" []\n");
            }
        }
        text
    }
}

impl Testbed {
    /// Writes the Service's manifest, and waits until a running gateway has it in force.
    pub fn apply_service(&self, served: &EchoService<'_>) {
        let version = || self.query(&["status"])["policy"]["version"].as_str().unwrap_or_default().to_owned();
        let before = self.process.is_some().then(version);
        let text = served.manifest();
        let is_new = !self.folder.path().join("policy/served.yaml").exists() || self.read_policy("served.yaml") != text;
        self.write_policy("served.yaml", &text);
        if let Some(before) = before.filter(|_| is_new) {
            assert!(crate::wait_for(Duration::from_secs(5), || version() != before), "{}", self.log());
        }
    }

    /// Starts a backend on every pod, named after the pod.
    pub fn start_backends(&self) {
        for pod in &self.pods {
            start_backend(pod);
        }
    }

    /// The [`EchoService`] in the output of `vipgate services`.
    pub fn service_status(&self) -> serde_json::Value {
        let services = self.query(&["services"]);
        let all = services["services"].as_array().unwrap();
        all.iter().find(|service| service["name"] == "Service served/echo").cloned().unwrap_or_default()
    }
}

/// Starts a backend on [`BACKEND_PORT`]: replies to each line over TCP and each datagram over UDP with its name and
/// the client address.
fn start_backend(host: &Host) {
    let name = host.name().to_owned();
    let listener = host.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, BACKEND_PORT))).join().unwrap().unwrap();
    let socket = host.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, BACKEND_PORT))).join().unwrap().unwrap();
    drop(thread::spawn(move || -> io::Result<()> {
        for stream in listener.incoming() {
            let (stream, name) = (stream?, name.clone());
            thread::spawn(move || serve_connection(stream, &name));
        }
        Ok(())
    }));
    let name = host.name().to_owned();
    drop(thread::spawn(move || -> io::Result<()> {
        let mut datagram = vec![0; 65_535];
        loop {
            let (length, peer) = socket.recv_from(&mut datagram)?;
            let observed = SocketAddr::new(peer.ip().to_canonical(), peer.port());
            // As long as the request, so that the reply is fragmented alike.
            let mut reply = format!("{name} {observed} ").into_bytes();
            reply.resize(reply.len().max(length), b'.');
            socket.send_to(&reply, peer)?;
        }
    }));
}

fn serve_connection(stream: TcpStream, name: &str) -> io::Result<()> {
    let peer = stream.peer_addr()?;
    let observed = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        line?;
        out.write_all(format!("{name} {observed}\n").as_bytes())?;
    }
    Ok(())
}

/// Reply of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EchoReply {
    /// The backend's name.
    pub backend: String,
    /// The client's address as the backend sees it.
    pub observed: SocketAddr,
    /// The client's own address.
    pub local: SocketAddr,
}

fn parse_reply(text: &str, local: SocketAddr) -> io::Result<EchoReply> {
    let mut words = text.split_whitespace();
    let (backend, observed) =
        (words.next().unwrap_or_default(), words.next().and_then(|observed| observed.parse().ok()));
    let observed = observed.ok_or_else(|| io::Error::other(format!("`{text}` is no reply")))?;
    Ok(EchoReply { backend: backend.to_owned(), observed, local })
}

/// An established connection to a backend.
#[derive(Debug)]
pub struct Connection {
    reader: BufReader<TcpStream>,
    local: SocketAddr,
}

impl Connection {
    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// When no reply comes in time.
    pub fn query(&mut self) -> io::Result<EchoReply> {
        self.reader.get_mut().write_all(b"?\n")?;
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        parse_reply(&line, self.local)
    }
}

/// Connects from a host.
///
/// # Errors
/// When the connect fails or times out.
pub fn connect(host: &Host, to: (&str, u16)) -> io::Result<Connection> {
    let to = SocketAddr::new(to.0.parse().unwrap(), to.1);
    let connecting = host.run(move || {
        let stream = TcpStream::connect_timeout(&to, REPLY_TIMEOUT)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?;
        Ok(Connection { reader: BufReader::new(stream), local })
    });
    connecting.join().unwrap()
}

/// Sends one request over a new connection.
///
/// # Errors
/// When the connect fails or no reply comes in time.
pub fn query_tcp(host: &Host, to: (&str, u16)) -> io::Result<EchoReply> {
    connect(host, to)?.query()
}

/// Sends one request in a datagram of `bytes` bytes.
///
/// # Errors
/// When no reply comes in time, or the port is unreachable.
pub fn query_udp(host: &Host, to: (&str, u16), bytes: usize) -> io::Result<EchoReply> {
    let to = SocketAddr::new(to.0.parse().unwrap(), to.1);
    let reply = host.run(move || {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
        // A connected socket receives from this address only.
        socket.connect(to)?;
        socket.send(&vec![b'?'; bytes])?;
        let mut datagram = vec![0; 65_535];
        let length = socket.recv(&mut datagram)?;
        parse_reply(&String::from_utf8_lossy(&datagram[..length]), socket.local_addr()?)
    });
    reply.join().unwrap()
}
