//! Services of tests: their manifests, backends that say who they are and whom they see, and clients who ask them.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use vipgate::lab::Host;

use crate::World;

/// The VIPs of the Service that [`Served`] describes, which nothing else has.
pub const VIP: [&str; 2] = ["203.0.113.30", "2001:db8:113::30"];
/// Its TCP port at the VIP.
pub const TCP: u16 = 80;
/// Its UDP port there.
pub const UDP: u16 = 53;
/// Where backends listen, TCP and UDP.
pub const OWN: u16 = 9000;
/// Its health check.
pub const HEALTH: u16 = 30_030;

/// How long anybody waits for an answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// A backend in a manifest.
#[derive(Clone, Debug)]
pub struct Backend {
    address: String,
    conditions: &'static str,
    node: &'static str,
}

/// One that takes new sessions.
pub fn ready(address: &str) -> Backend {
    Backend { address: address.to_owned(), conditions: "{ready: true}", node: "node-1" }
}

/// One that ends, and still serves.
pub fn terminating(address: &str) -> Backend {
    Backend { conditions: "{ready: false, serving: true, terminating: true}", ..ready(address) }
}

impl Backend {
    /// The same on another node.
    #[must_use]
    pub fn on(self, node: &'static str) -> Self {
        Self { node, ..self }
    }
}

/// The Service `served/echo` at [`VIP`].
#[derive(Clone, Debug, Default)]
pub struct Served<'a> {
    /// Lines of its spec.
    pub spec: &'a str,
    /// Lines of its metadata.
    pub metadata: &'a str,
    /// Backends of either family.
    pub backends: &'a [Backend],
}

impl Served<'_> {
    /// Its manifests.
    pub fn manifest(&self) -> String {
        let Self { spec, metadata, backends } = self;
        let mut text = format!(
            "apiVersion: v1\nkind: Service\nmetadata:\n  name: echo\n  namespace: served\n{metadata}\
             spec:\n  type: LoadBalancer\n{spec}\n  ports:\n\
             \x20   - {{name: tcp, port: {TCP}, targetPort: {OWN}, protocol: TCP}}\n\
             \x20   - {{name: udp, port: {UDP}, targetPort: {OWN}, protocol: UDP}}\n\
             status: {{loadBalancer: {{ingress: [{{ip: {}}}, {{ip: \"{}\"}}]}}}}\n",
            VIP[0], VIP[1]
        );
        for (family, name) in [("IPv4", "echo-4"), ("IPv6", "echo-6")] {
            let own = backends.iter().filter(|backend| backend.address.contains(':') == (family == "IPv6"));
            let endpoints = own.map(|Backend { address, conditions, node }| {
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
                 addressType: {family}\nports: [{{name: tcp, port: {OWN}}}, {{name: udp, port: {OWN}, protocol: UDP}}]\n\
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

impl World {
    /// Lets this Service be, in place of what it was, and waits until a gateway that runs has it in force.
    pub fn serve(&self, served: &Served<'_>) {
        let version = || self.ask(&["status"])["policy"]["version"].as_str().unwrap_or_default().to_owned();
        let before = self.process.is_some().then(version);
        let text = served.manifest();
        let is_new = !self.folder.path().join("policy/served.yaml").exists() || self.policy("served.yaml") != text;
        self.write_policy("served.yaml", &text);
        if let Some(before) = before.filter(|_| is_new) {
            assert!(crate::wait_for(Duration::from_secs(5), || version() != before), "{}", self.log());
        }
    }

    /// Every pod serves, and says its name.
    pub fn start_backends(&self) {
        for pod in &self.pods {
            start(pod);
        }
    }

    /// `vipgate services` about the Service of [`Served`].
    pub fn served(&self) -> serde_json::Value {
        let services = self.ask(&["services"]);
        let all = services["services"].as_array().unwrap();
        all.iter().find(|service| service["name"] == "Service served/echo").cloned().unwrap_or_default()
    }
}

/// A host serves on [`OWN`]: each line over TCP, each datagram over UDP, is answered with its name and whom it sees.
fn start(host: &Host) {
    let name = host.name().to_owned();
    let listener = host.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, OWN))).join().unwrap().unwrap();
    let socket = host.run(|| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, OWN))).join().unwrap().unwrap();
    drop(thread::spawn(move || -> io::Result<()> {
        for stream in listener.incoming() {
            let (stream, name) = (stream?, name.clone());
            thread::spawn(move || answer(stream, &name));
        }
        Ok(())
    }));
    let name = host.name().to_owned();
    drop(thread::spawn(move || -> io::Result<()> {
        let mut datagram = vec![0; 65_535];
        loop {
            let (length, peer) = socket.recv_from(&mut datagram)?;
            let seen = SocketAddr::new(peer.ip().to_canonical(), peer.port());
            // As long as the question, so that it is cut into as many pieces.
            let mut said = format!("{name} {seen} ").into_bytes();
            said.resize(said.len().max(length), b'.');
            socket.send_to(&said, peer)?;
        }
    }));
}

fn answer(stream: TcpStream, name: &str) -> io::Result<()> {
    let peer = stream.peer_addr()?;
    let seen = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let mut out = stream.try_clone()?;
    for line in BufReader::new(stream).lines() {
        line?;
        out.write_all(format!("{name} {seen}\n").as_bytes())?;
    }
    Ok(())
}

/// Who answered, and whom he saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The backend's name.
    pub backend: String,
    /// The client as the backend saw it.
    pub seen: SocketAddr,
    /// The client as it knows itself.
    pub own: SocketAddr,
}

fn read(text: &str, own: SocketAddr) -> io::Result<Answer> {
    let mut words = text.split_whitespace();
    let (backend, seen) = (words.next().unwrap_or_default(), words.next().and_then(|seen| seen.parse().ok()));
    let seen = seen.ok_or_else(|| io::Error::other(format!("`{text}` is no answer")))?;
    Ok(Answer { backend: backend.to_owned(), seen, own })
}

/// A connection to a backend, asked as often as one likes.
#[derive(Debug)]
pub struct Connection {
    reader: BufReader<TcpStream>,
    own: SocketAddr,
}

impl Connection {
    /// Asks on it.
    ///
    /// # Errors
    /// When no answer comes in time.
    pub fn ask(&mut self) -> io::Result<Answer> {
        self.reader.get_mut().write_all(b"?\n")?;
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        read(&line, self.own)
    }
}

/// Connects from a host.
///
/// # Errors
/// When nobody answers in time.
pub fn connect(host: &Host, to: (&str, u16)) -> io::Result<Connection> {
    let to = SocketAddr::new(to.0.parse().unwrap(), to.1);
    let connecting = host.run(move || {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let own = stream.local_addr()?;
        Ok(Connection { reader: BufReader::new(stream), own })
    });
    connecting.join().unwrap()
}

/// Asks once over a new connection.
///
/// # Errors
/// When nobody answers in time.
pub fn ask_tcp(host: &Host, to: (&str, u16)) -> io::Result<Answer> {
    connect(host, to)?.ask()
}

/// Asks once by a datagram of so many bytes.
///
/// # Errors
/// When nobody answers in time, or says that nobody listens.
pub fn ask_udp(host: &Host, to: (&str, u16), bytes: usize) -> io::Result<Answer> {
    let to = SocketAddr::new(to.0.parse().unwrap(), to.1);
    let asking = host.run(move || {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        // Only an answer from where the question went is heard.
        socket.connect(to)?;
        socket.send(&vec![b'?'; bytes])?;
        let mut said = vec![0; 65_535];
        let length = socket.recv(&mut said)?;
        read(&String::from_utf8_lossy(&said[..length]), socket.local_addr()?)
    });
    asking.join().unwrap()
}
