//! A Kubernetes API server with its etcd on a host's loopback: kube-apiserver 1.20.2, the only version that can be built
//! from Debian (`tests/kubernetes/apiserver.sh`).
//!
//! No controllers run: nothing assigns a Service's status, makes EndpointSlices, or finishes the deletion of a namespace.
//! What 1.20 doesn't have: `discovery.k8s.io/v1`, which a custom resource replaces; CEL validation of custom resources,
//! which it ignores; fields of Services such as `loadBalancerClass`, which it drops.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vipgate_lab::api_server::{ENDPOINT_SLICES, Flags, kubeconfig};
use vipgate_lab::{self as lab, Host, Process};

use crate::etcd::Etcd;
use crate::tls::{Certificate, CertificateAuthority, tomorrow};

/// URL on the host's loopback.
pub const URL: &str = "https://127.0.0.1:6443";
/// A user that may do everything.
pub const ADMIN: &str = "admin";
/// A user with only those rights that a test grants.
pub const POLICYD: &str = "policyd";
/// Not etcd's default: a policy server's own etcd may run on the same host.
const ETCD_PORT: u16 = 12379;
/// The interval of updates about kinds that don't change; 5 s in clusters.
const ETCD_FLAGS: [&str; 2] = ["--unsafe-no-fsync", "--experimental-watch-progress-notify-interval=1s"];

/// An API server, running or not, with vipgate's CRDs and one for EndpointSlices. Everything ends on drop.
#[derive(Debug)]
pub struct ApiServer {
    host: Host,
    etcd: Etcd,
    folder: TempDir,
    ca_file: String,
    tls: Certificate,
    /// Certificate and key that sign service account tokens.
    service_accounts: Certificate,
    flags: Vec<String>,
    process: Option<Process>,
    start_count: u32,
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
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"];
        let mut server = Self {
            host: host.clone(),
            etcd: Etcd::start_at(host, ETCD_PORT, &ETCD_FLAGS),
            tls: ca.sign("server", &names, tomorrow()),
            service_accounts: ca.sign("service-accounts", &[], tomorrow()),
            ca_file: ca.ca_file,
            folder,
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            process: None,
            start_count: 0,
        };
        let tokens = format!("{ADMIN},{ADMIN},1,system:masters\n{POLICYD},{POLICYD},2\n");
        fs::write(server.path("tokens.csv"), tokens).unwrap();
        for user in [ADMIN, POLICYD] {
            fs::write(server.kubeconfig(user), kubeconfig("127.0.0.1", &server.ca_file, user)).unwrap();
        }
        server.start();
        // It has fields for CEL.
        server.apply_unvalidated(include_str!("../../conf/crds.yaml"));
        server.apply(ENDPOINT_SLICES);
        server.kubectl(&["wait", "--for=condition=Established", "--timeout=20s", "crd", "--all"]);
        server
    }

    /// Starts the API server and waits until it is ready. Its data is in etcd.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "the API server runs");
        self.start_count += 1;
        let flags = Flags {
            etcd: self.etcd.endpoint(),
            address: "127.0.0.1",
            certificates: &self.path("certificates"),
            tokens: &self.path("tokens.csv"),
            service_accounts: [self.service_accounts.key.clone(), self.service_accounts.cert.clone()],
            lacks_endpoint_slices: true,
        };
        let mut command = vec![
            program("VIPGATE_KUBE_APISERVER"),
            format!("--tls-cert-file={}", self.tls.cert),
            format!("--tls-private-key-file={}", self.tls.key),
        ];
        command.extend(flags.to_arguments());
        command.extend(self.flags.iter().cloned());
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut process = self.host.spawn(&command, &self.log_path()).unwrap();
        process.wait_ready(Duration::from_mins(1), || self.is_ready()).unwrap_or_else(|error| panic!("{error}"));
        self.process = Some(process);
    }

    /// Sends SIGKILL and waits for its exit. etcd goes on.
    pub fn stop(&mut self) {
        let mut process = self.process.take().expect("the API server runs");
        process.stop("KILL", Duration::from_secs(5)).unwrap().expect("the API server exits");
    }

    /// Kills and starts it. Its watch cache is empty afterwards: watches from an older resourceVersion get 410 Gone.
    pub fn restart(&mut self) {
        self.stop();
        self.start();
    }

    /// Saves a snapshot of all objects.
    pub fn save_snapshot(&self, file: &Path) {
        self.etcd.save_snapshot(file);
    }

    /// Replaces all objects by a snapshot: resourceVersions go back. The API server is killed and started again.
    pub fn restore_snapshot(&mut self, file: &Path) {
        self.stop();
        self.etcd.restore_snapshot(file);
        self.start();
    }

    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcd
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the API server runs")
    }

    fn is_ready(&self) -> bool {
        self.try_request(ADMIN, "GET", "/readyz", None).is_ok_and(|(status, _)| status == 200)
    }

    fn path(&self, file: &str) -> String {
        self.folder.path().join(file).display().to_string()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join(format!("log-{}", self.start_count))
    }

    /// The API server's log since its last start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Path of a user's kubeconfig: [`ADMIN`] or [`POLICYD`].
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder.path().join(format!("{user}.kubeconfig"))
    }

    /// Path of the CA's certificate.
    pub fn ca_file(&self) -> &str {
        &self.ca_file
    }

    /// Runs `kubectl` as a user on the host; its stdout.
    ///
    /// # Errors
    /// When it fails: command and stderr.
    pub fn try_kubectl(&self, user: &str, arguments: &[&str]) -> Result<String, lab::Error> {
        // kubectl caches discovery by address and port below HOME: each server needs its own.
        let home = format!("HOME={}", self.folder.path().display());
        let kubeconfig = format!("KUBECONFIG={}", self.kubeconfig(user).display());
        let kubectl = program("VIPGATE_KUBECTL");
        self.host.output(&[&["env", &home, &kubeconfig, &kubectl], arguments].concat())
    }

    /// Runs `kubectl` as [`ADMIN`]; its stdout.
    #[track_caller]
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(ADMIN, arguments).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Applies manifests; unknown fields are errors. Their namespaces must exist, or come first.
    #[track_caller]
    pub fn apply(&self, manifests: &str) {
        self.apply_with("strict", manifests);
    }

    /// Applies manifests; the server drops fields that it doesn't know.
    #[track_caller]
    pub fn apply_unvalidated(&self, manifests: &str) {
        self.apply_with("ignore", manifests);
    }

    #[track_caller]
    fn apply_with(&self, validation: &str, manifests: &str) {
        let file = tempfile::NamedTempFile::new_in(self.folder.path()).unwrap();
        fs::write(file.path(), manifests).unwrap();
        let validation = format!("--validate={validation}");
        self.kubectl(&["apply", &validation, "-f", &file.path().display().to_string()]);
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

fn program(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set: run `make e2e-kubernetes` or `make e2e-node`"))
}
