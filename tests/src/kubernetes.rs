//! A Kubernetes API server with its etcd on a host's loopback: kube-apiserver 1.20.2, the only version that can be built
//! from Debian (`tests/kubernetes/apiserver.sh`).
//!
//! No controllers run: nothing assigns a Service's status, makes EndpointSlices, or finishes the deletion of a namespace.
//! What 1.20 doesn't have: `discovery.k8s.io/v1`, which a custom resource replaces; CEL validation of custom resources,
//! which it ignores; fields of Services such as `loadBalancerClass`, which it drops.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;
pub use vipgate_lab::api_server::ADMIN;
use vipgate_lab::api_server::{self, ADMINISTRATORS, Config, ENDPOINT_SLICES};
use vipgate_lab::{self as lab, Host};

use crate::tls::{CertificateAuthority, tomorrow};

/// URL on the host's loopback.
pub const URL: &str = "https://127.0.0.1:6443";
/// A user with only those rights that a test grants.
pub const POLICYD: &str = "policyd";
/// Not etcd's default: a policy server's own etcd may run on the same host.
const ETCD_PORT: u16 = 12379;
/// The interval of updates about kinds that don't change; 5 s in clusters.
const ETCD_FLAGS: [&str; 2] = ["--unsafe-no-fsync", "--experimental-watch-progress-notify-interval=1s"];

/// An API server, running or not, with vipgate's CRDs and one for EndpointSlices. Everything ends on drop.
#[derive(Debug)]
pub struct ApiServer {
    server: api_server::ApiServer,
    host: Host,
    ca_file: String,
    _folder: TempDir,
}

impl ApiServer {
    /// Starts etcd and an API server on a host, and applies the CRDs.
    pub fn new(host: &Host) -> Self {
        Self::with_flags(host, &[])
    }

    /// The same with additional flags of kube-apiserver.
    pub fn with_flags(host: &Host, flags: &[&str]) -> Self {
        let folder = vipgate_lab::directory().unwrap();
        let ca = CertificateAuthority::new(folder.path(), "kubernetes");
        let tls = ca.sign("server", &["127.0.0.1", "localhost", "kubernetes.default.svc"], tomorrow());
        let own = [format!("--tls-cert-file={}", tls.cert), format!("--tls-private-key-file={}", tls.key)];
        let config = Config {
            address: "127.0.0.1",
            users: &[(ADMIN, ADMINISTRATORS), (POLICYD, "")],
            flags: own.into_iter().chain(flags.iter().map(|flag| (*flag).to_owned())).collect(),
            ca_file: Some(ca.ca_file.clone()),
            etcd_port: ETCD_PORT,
            etcd_flags: &ETCD_FLAGS,
        };
        let server = api_server::ApiServer::start(host, folder.path(), config);
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        let server = Self { server, host: host.clone(), ca_file: ca.ca_file, _folder: folder };
        // It has fields for CEL.
        server.apply_unvalidated(include_str!("../../conf/crds.yaml"));
        server.apply(ENDPOINT_SLICES);
        server.kubectl(&["wait", "--for=condition=Established", "--timeout=20s", "crd", "--all"]);
        server
    }

    /// Starts the API server and waits until it is ready. Its data is in etcd.
    pub fn start(&mut self) {
        self.server.resume().unwrap_or_else(|error| panic!("{error}"));
    }

    /// Sends SIGKILL and waits for its exit. etcd goes on.
    pub fn stop(&mut self) {
        self.server.kill().unwrap();
    }

    /// Kills and starts it. Its watch cache is empty afterwards: watches from an older resourceVersion get 410 Gone.
    pub fn restart(&mut self) {
        self.stop();
        self.start();
    }

    /// Saves a snapshot of all objects.
    pub fn save_snapshot(&mut self, file: &Path) {
        self.server.etcd().etcdctl(&["snapshot", "save", &file.display().to_string()]).unwrap();
    }

    /// Replaces all objects by a snapshot: resourceVersions go back. The API server is killed and started again.
    pub fn restore_snapshot(&mut self, file: &Path) {
        self.stop();
        self.server.etcd().restore_snapshot(file).unwrap_or_else(|error| panic!("{error}"));
        self.start();
    }

    /// Path of a user's kubeconfig: [`ADMIN`] or [`POLICYD`].
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.server.kubeconfig(user)
    }

    /// Runs `kubectl` as a user on the host; its stdout.
    ///
    /// # Errors
    /// When it fails: command and stderr.
    pub fn try_kubectl(&self, user: &str, arguments: &[&str]) -> Result<String, lab::Error> {
        self.server.kubectl(user, arguments)
    }

    /// Runs `kubectl` as [`ADMIN`]; its stdout.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(ADMIN, arguments).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Applies manifests; unknown fields are errors. Their namespaces must exist, or come first.
    #[track_caller]
    pub fn apply(&self, manifests: &str) {
        self.server.apply(ADMIN, "strict", manifests).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Applies manifests; the server drops fields that it doesn't know.
    #[track_caller]
    pub fn apply_unvalidated(&self, manifests: &str) {
        self.server.apply(ADMIN, "ignore", manifests).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Deletes an object and waits until it is removed.
    #[track_caller]
    pub fn delete(&self, resource: &str, namespace: &str, name: &str) {
        self.kubectl(&["delete", "-n", namespace, resource, name, "--timeout=20s"]);
    }

    /// Changes an object's status by a JSON merge patch, such as `{"status": {"loadBalancer": {"ingress": []}}}`.
    #[track_caller]
    pub fn patch_status(&self, resource: &str, namespace: &str, name: &str, patch: &Value) {
        let patch = patch.to_string();
        self.kubectl(&["patch", "-n", namespace, resource, name, "--subresource=status", "--type=merge", "-p", &patch]);
    }

    /// An object.
    #[track_caller]
    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Value {
        serde_json::from_str(&self.kubectl(&["get", "-n", namespace, resource, name, "-o", "json"])).unwrap()
    }

    /// Sends a request as a user; the HTTP status and the body. A `PATCH` is a JSON merge patch.
    #[track_caller]
    pub fn request(&self, user: &str, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        self.try_request(user, method, path, body).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_request(
        &self,
        user: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, String), lab::Error> {
        // A user's token is the user's name.
        let authorization = format!("Authorization: Bearer {user}");
        let content = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let content = format!("Content-Type: {content}");
        let url = format!("{URL}{path}");
        let mut command = vec!["curl", "-sS", "--noproxy", "*", "--max-time", "20", "--cacert", &self.ca_file];
        command.extend(["-H", &authorization, "-H", &content, "-X", method, "-w", "\n%{http_code}", &url]);
        let body = body.map(Value::to_string);
        if let Some(body) = &body {
            command.extend(["--data-binary", body]);
        }
        let output = self.host.output(&command)?;
        let (body, status) = output.rsplit_once('\n').unwrap();
        Ok((status.parse().unwrap(), body.to_owned()))
    }
}
