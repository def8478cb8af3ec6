//! A Kubernetes API server with its etcd on a host, from the programs `kube-apiserver`, `etcd` and `kubectl`. No
//! controllers run.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use rcgen::KeyPair;

use crate::{Error, Host, Process, output};

/// `EndpointSlices` as a custom resource, for a version that lacks them ([`ApiServer::lacks_endpoint_slices`]).
pub const ENDPOINT_SLICES: &str = include_str!("api_server/endpointslices.yaml");
/// How long both programs may take to start.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// Bearer token of the administrator.
const TOKEN: &str = "admin";
/// Private and public key that sign and verify service account tokens.
const KEY_FILES: [&str; 2] = ["service-accounts.key", "service-accounts.pub"];
/// URL of etcd, on the host's loopback.
const ETCD: &str = "http://127.0.0.1:2379";
/// The last minor version of Kubernetes 1 without `discovery.k8s.io/v1`, and with these feature gates.
const LAST_WITHOUT_SLICES: u32 = 20;
/// Features that later versions have: Services with two families or protocols, and resource versions of kinds that don't
/// change follow the server's. Without the latter, a watch of such a kind gets no bookmarks.
const FEATURES: &str = "--feature-gates=IPv6DualStack=true,EfficientWatchResumption=true,MixedProtocolLBService=true";

/// Flags of kube-apiserver.
#[derive(Debug)]
pub struct Flags<'a> {
    /// URL of etcd.
    pub etcd: &'a str,
    /// Address that it listens at, port 6443.
    pub address: &'a str,
    /// Directory of the certificate that it creates, unless it is given one.
    pub certificates: &'a str,
    /// File with bearer tokens.
    pub tokens: &'a str,
    /// Files with the private and the public key of service account tokens.
    pub service_accounts: [String; 2],
    /// Whether the version has no `EndpointSlices`.
    pub lacks_endpoint_slices: bool,
}

impl Flags<'_> {
    /// The command line.
    pub fn to_arguments(&self) -> Vec<String> {
        let [private, public] = &self.service_accounts;
        let mut arguments = vec![
            format!("--etcd-servers={}", self.etcd),
            // Without it, it searches a default route for an address.
            format!("--advertise-address={}", self.address),
            format!("--bind-address={}", self.address),
            "--secure-port=6443".to_owned(),
            format!("--cert-dir={}", self.certificates),
            format!("--token-auth-file={}", self.tokens),
            "--authorization-mode=RBAC".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/16,fd96::/112".to_owned(),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            format!("--service-account-signing-key-file={private}"),
            format!("--service-account-key-file={public}"),
            // Pods need no service account, which a controller would create.
            "--disable-admission-plugins=ServiceAccount".to_owned(),
            "--endpoint-reconciler-type=none".to_owned(),
        ];
        if self.lacks_endpoint_slices {
            // The built-in version would hide the custom resource.
            arguments.extend([FEATURES, "--runtime-config=discovery.k8s.io/v1beta1=false"].map(str::to_owned));
        }
        arguments
    }
}

/// A kubeconfig for an API server at an address, of a user whose bearer token is its name.
pub fn kubeconfig(address: &str, ca_file: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters: [{{name: lab, cluster: {{server: \"https://{address}:6443\", certificate-authority: {ca_file}}}}}]\n\
         users: [{{name: {user}, user: {{token: {user}}}}}]\n\
         contexts: [{{name: lab, context: {{cluster: lab, user: {user}}}}}]\n\
         current-context: lab\n"
    )
}

/// An API server, running or not. Everything ends on drop.
#[derive(Debug)]
pub struct ApiServer {
    host: Host,
    address: String,
    directory: PathBuf,
    program: String,
    kubectl: String,
    version: (String, u32),
    process: Option<Process>,
    _etcd: Process,
}

impl ApiServer {
    /// Starts etcd and an API server at an address of the host. Their data is in `directory`. The programs are those
    /// that the environment variables `VIPGATE_KUBE_APISERVER` and `VIPGATE_KUBECTL` name, else those of `PATH`.
    ///
    /// # Errors
    /// When a program is missing, or doesn't start in time.
    pub fn start(host: &Host, address: &str, directory: &Path) -> Result<Self, Error> {
        let program = program("VIPGATE_KUBE_APISERVER", "kube-apiserver");
        let kubectl = self::program("VIPGATE_KUBECTL", "kubectl");
        let version = output(&[&program, "--version"]).map_err(|_| Error::NoApiServer(program.clone()))?;
        let version = version.trim().trim_start_matches("Kubernetes ").to_owned();
        let minor = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(u32::MAX);
        output(&[&kubectl, "version", "--client"])?;
        let mut server = Self {
            _etcd: start_etcd(host, directory)?,
            host: host.clone(),
            address: address.to_owned(),
            directory: directory.to_owned(),
            program,
            kubectl,
            version: (version, minor),
            process: None,
        };
        server.write_credentials()?;
        server.resume()?;
        Ok(server)
    }

    /// Its version, such as `v1.30.0`.
    pub fn version(&self) -> &str {
        &self.version.0
    }

    /// Whether the version has no EndpointSlices: a custom resource takes their place.
    pub fn lacks_endpoint_slices(&self) -> bool {
        self.version.1 <= LAST_WITHOUT_SLICES
    }

    /// Path of the administrator's kubeconfig.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.join("kubeconfig")
    }

    /// Runs `kubectl` on the host; its stdout.
    ///
    /// # Errors
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String, Error> {
        // It caches discovery by address and port below HOME: each server needs its own.
        let home = format!("HOME={}", self.directory.display());
        let kubeconfig = format!("KUBECONFIG={}", self.kubeconfig().display());
        self.host.output(&[&["env", &home, &kubeconfig, &self.kubectl], arguments].concat())
    }

    /// The command line of `kubectl` from the machine that the host is on.
    pub fn kubectl_command(&self) -> String {
        let (netns, kubeconfig) = (self.host.netns(), self.kubeconfig());
        format!("ip netns exec {netns} {} --kubeconfig {}", self.kubectl, kubeconfig.display())
    }

    /// Applies manifests; the server drops fields that it doesn't know.
    ///
    /// # Errors
    /// When they can't be applied.
    pub fn apply(&self, manifests: &str) -> Result<(), Error> {
        let file = self.directory.join("manifests.yaml");
        fs::write(&file, manifests).map_err(|source| Error::Write { file: file.display().to_string(), source })?;
        self.kubectl(&["apply", "--validate=ignore", "-f", &file.display().to_string()]).map(drop)
    }

    /// Kills the API server with SIGKILL. etcd goes on.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn kill(&mut self) -> Result<(), Error> {
        let mut process = self.process.take().ok_or(Error::Removed)?;
        process.stop("KILL", Duration::from_secs(5)).map(drop)
    }

    /// Starts the API server again, and waits until it is ready.
    ///
    /// # Errors
    /// When it doesn't start in time.
    pub fn resume(&mut self) -> Result<(), Error> {
        let path = |file: &str| self.directory.join(file).display().to_string();
        let flags = Flags {
            etcd: ETCD,
            address: &self.address,
            certificates: &path("certificates"),
            tokens: &path("tokens.csv"),
            service_accounts: KEY_FILES.map(path),
            lacks_endpoint_slices: self.lacks_endpoint_slices(),
        };
        let command = [vec![self.program.clone()], flags.to_arguments()].concat();
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let log = self.directory.join("kube-apiserver.log");
        let mut process = self.host.spawn(&command, &log)?;
        process.wait_ready(START_TIMEOUT, || self.kubectl(&["get", "--raw", "/readyz"]).is_ok())?;
        self.process = Some(process);
        Ok(())
    }

    /// Writes the key that signs service account tokens, the administrator's token, and a kubeconfig with it.
    fn write_credentials(&self) -> Result<(), Error> {
        let key = KeyPair::generate()
            .map_err(|error| Error::Failed { command: "generating a key".to_owned(), output: error.to_string() })?;
        // It creates its certificate itself: the file has that of the CA, too.
        let ca = self.directory.join("certificates/apiserver.crt");
        let kubeconfig = kubeconfig(&self.address, &ca.display().to_string(), TOKEN);
        let tokens = format!("{TOKEN},{TOKEN},1,system:masters\n");
        let [private, public] = KEY_FILES;
        let files = [
            (private, key.serialize_pem()),
            (public, key.public_key_pem()),
            ("tokens.csv", tokens),
            ("kubeconfig", kubeconfig),
        ];
        for (file, text) in files {
            let file = self.directory.join(file);
            fs::write(&file, text).map_err(|source| Error::Write { file: file.display().to_string(), source })?;
        }
        Ok(())
    }
}

fn start_etcd(host: &Host, directory: &Path) -> Result<Process, Error> {
    let (data, log) = (directory.join("etcd").display().to_string(), directory.join("etcd.log"));
    let command = [
        "etcd",
        "--data-dir",
        &data,
        "--listen-client-urls",
        ETCD,
        "--advertise-client-urls",
        ETCD,
        "--listen-peer-urls",
        "http://127.0.0.1:2380",
        "--logger",
        "zap",
        "--log-level",
        "warn",
        "--unsafe-no-fsync",
    ];
    let mut process = host.spawn(&command, &log)?;
    let health = ["curl", "-sf", "--noproxy", "*", "--max-time", "2", "http://127.0.0.1:2379/health"];
    process.wait_ready(START_TIMEOUT, || host.output(&health).is_ok())?;
    Ok(process)
}

/// The program that an environment variable names, or this one of `PATH`.
fn program(variable: &str, name: &str) -> String {
    env::var(variable).unwrap_or_else(|_| name.to_owned())
}
