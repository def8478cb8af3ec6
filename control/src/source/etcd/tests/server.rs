//! Real etcd servers on loopback, with temporary data directories.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use etcd_client::{Client, Txn, TxnOp};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

/// Timeout of any operation, generous for a slow machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// etcd's default maximum of operations per transaction.
const MAX_TXN_OPS: usize = 128;

/// A cluster member, running or not. Dropping it stops it and removes its data.
pub(crate) struct EtcdServer {
    data: TempDir,
    client: u16,
    peer: u16,
    cluster: String,
    child: Option<Child>,
}

impl EtcdServer {
    /// A single server, not running yet.
    pub(crate) fn new() -> Self {
        Self::cluster(1).remove(0)
    }

    /// A single server, running.
    pub(crate) async fn running() -> Self {
        let mut server = Self::new();
        server.start().await;
        server
    }

    /// The members of one cluster, not running yet.
    pub(crate) fn cluster(members: usize) -> Vec<Self> {
        let peers: Vec<u16> = (0..members).map(|_| free_port()).collect();
        let url = |peer: &u16| format!("m{peer}=http://127.0.0.1:{peer}");
        let cluster = peers.iter().map(url).collect::<Vec<_>>().join(",");
        let member = |peer| Self {
            data: tempfile::tempdir().unwrap(),
            client: free_port(),
            peer,
            cluster: cluster.clone(),
            child: None,
        };
        peers.into_iter().map(member).collect()
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.client)
    }

    /// Starts it without waiting until it responds.
    pub(crate) fn spawn(&mut self) {
        let (client, peer) = (self.endpoint(), format!("http://127.0.0.1:{}", self.peer));
        let child = Command::new("etcd")
            .args(["--name", &format!("m{}", self.peer)])
            .arg("--data-dir")
            .arg(self.data.path().join("etcd"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.cluster])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "error"])
            .args(["--logger", "zap"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("etcd is installed"));
    }

    pub(crate) async fn start(&mut self) {
        self.spawn();
        self.wait_ready().await;
    }

    pub(crate) async fn wait_ready(&self) {
        let end = Instant::now() + TEST_TIMEOUT;
        while !matches!(timeout(Duration::from_secs(1), self.client().await.get("x", None)).await, Ok(Ok(_))) {
            assert!(Instant::now() < end, "etcd doesn't respond at {}", self.endpoint());
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect([self.endpoint()], None).await.unwrap()
    }

    /// Puts a key; retries during an election.
    pub(crate) async fn put(&self, key: &str, value: impl Into<Vec<u8>>) {
        let (value, end) = (value.into(), Instant::now() + TEST_TIMEOUT);
        while let Err(error) = self.client().await.put(key, value.clone(), None).await {
            assert!(Instant::now() < end, "{error}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn delete(&self, key: &str) {
        self.client().await.delete(key, None).await.unwrap();
    }

    pub(crate) async fn transaction(&self, operations: impl Into<Vec<TxnOp>>) {
        self.client().await.txn(Txn::new().and_then(operations)).await.unwrap();
    }

    /// Puts many keys, in as few transactions as possible.
    pub(crate) async fn put_all(&self, pairs: impl IntoIterator<Item = (String, String)>) {
        let puts: Vec<TxnOp> = pairs.into_iter().map(|(key, value)| TxnOp::put(key, value, None)).collect();
        for chunk in puts.chunks(MAX_TXN_OPS) {
            self.transaction(chunk).await;
        }
    }

    /// Compacts the whole history.
    pub(crate) async fn compact(&self) {
        let mut client = self.client().await;
        let revision = client.get("x", None).await.unwrap().header().unwrap().revision();
        client.compact(revision, None).await.unwrap();
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn suspend(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().expect("it runs").id();
        kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), signal).unwrap();
    }

    /// Removes its data. It must not be running.
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.data.path().join("etcd")).unwrap();
    }

    /// Sets the client port of the next start; returns the previous one.
    pub(crate) fn set_client_port(&mut self, client: Option<u16>) -> u16 {
        std::mem::replace(&mut self.client, client.unwrap_or_else(free_port))
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A free port below the ephemeral range: otherwise a client could get the port of a stopped server, even the client
/// that connects to that server.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes run in parallel.
    let first = 10_000 + u16::try_from(std::process::id() % 100).unwrap() * 200;
    (0..200)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 200)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}
