//! Real servers of etcd, on loopback and in temporary directories.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use etcd_client::{Client, Txn, TxnOp};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

/// Far more than anything takes on a slow machine.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// etcd takes no more operations in a transaction.
const TRANSACTION: usize = 128;

/// A member of a cluster, running or not. Ends with its data.
pub(crate) struct Server {
    data: TempDir,
    client: u16,
    peer: u16,
    cluster: String,
    child: Option<Child>,
}

impl Server {
    /// One that is not running yet.
    pub(crate) fn new() -> Self {
        Self::cluster(1).remove(0)
    }

    /// One that answers.
    pub(crate) async fn running() -> Self {
        let mut server = Self::new();
        server.start().await;
        server
    }

    /// Members of one cluster that are not running yet.
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

    /// Starts it without waiting for its answer.
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
        self.answers().await;
    }

    pub(crate) async fn answers(&self) {
        let end = Instant::now() + LONG;
        while !matches!(timeout(Duration::from_secs(1), self.client().await.get("x", None)).await, Ok(Ok(_))) {
            assert!(Instant::now() < end, "etcd doesn't answer at {}", self.endpoint());
            sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect([self.endpoint()], None).await.unwrap()
    }

    /// Puts a key; in a cluster that holds an election, after it.
    pub(crate) async fn put(&self, key: &str, value: impl Into<Vec<u8>>) {
        let (value, end) = (value.into(), Instant::now() + LONG);
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

    /// Puts many keys.
    pub(crate) async fn fill(&self, pairs: impl IntoIterator<Item = (String, String)>) {
        let puts: Vec<TxnOp> = pairs.into_iter().map(|(key, value)| TxnOp::put(key, value, None)).collect();
        for some in puts.chunks(TRANSACTION) {
            self.transaction(some).await;
        }
    }

    /// Forgets all of the past.
    pub(crate) async fn compact(&self) {
        let mut client = self.client().await;
        let now = client.get("x", None).await.unwrap().header().unwrap().revision();
        client.compact(now, None).await.unwrap();
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub(crate) fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().expect("it runs").id();
        kill_process(Pid::from_raw(i32::try_from(id).unwrap()).unwrap(), signal).unwrap();
    }

    /// Removes its data. It must not run.
    pub(crate) fn wipe(&self) {
        std::fs::remove_dir_all(self.data.path().join("etcd")).unwrap();
    }

    /// Lets it listen for clients elsewhere when it starts again, and returns where it listened.
    pub(crate) fn move_to(&mut self, client: Option<u16>) -> u16 {
        std::mem::replace(&mut self.client, client.unwrap_or_else(free_port))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port below those that the kernel gives to clients: one of them could take it while a server is away, even the
/// client that calls for that server.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Other processes run the same tests.
    let first = 10_000 + u16::try_from(std::process::id() % 100).unwrap() * 200;
    (0..200)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 200)
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}
