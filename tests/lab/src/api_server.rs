//! A Kubernetes API server with its etcd on a host, from the programs `kube-apiserver`, `etcd` and `kubectl`. No
//! controllers run.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use rcgen::KeyPair;
use tempfile::NamedTempFile;

use crate::etcd::Etcd;
use crate::{Error, Host, Process, output};

/// `EndpointSlices` as a custom resource, for a version that lacks them ([`ApiServer::lacks_endpoint_slices`]).
pub const ENDPOINT_SLICES: &str = include_str!("api_server/endpointslices.yaml");
/// How long it may take to start.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// The user that may do everything, with its group. It has to be one of the users.
pub const ADMIN: &str = "admin";
pub const ADMINISTRATORS: &str = "system:masters";
/// Private and public key that sign and verify service account tokens.
const KEY_FILES: [&str; 2] = ["service-accounts.key", "service-accounts.pub"];
/// The last minor version of Kubernetes 1 without `discovery.k8s.io/v1`, and with these feature gates.
const LAST_WITHOUT_SLICES: u32 = 20;
/// Features that later versions have: Services with two families or protocols, and resource versions of kinds that don't
/// change follow the server's. Without the latter, a watch of such a kind gets no bookmarks.
const FEATURES: &str = "--feature-gates=IPv6DualStack=true,EfficientWatchResumption=true,MixedProtocolLBService=true";

/// How an API server is started.
#[derive(Clone, Debug)]
pub struct Config<'a> {
    /// Address of the host that it listens at, port 6443.
    pub address: &'a str,
    /// Users with their groups. A user's bearer token is its name.
    pub users: &'a [(&'a str, &'a str)],
    /// Additional flags of kube-apiserver.
    pub flags: Vec<String>,
    /// File with the CA of the certificate that `flags` name; without one, the server creates its certificate.
    pub ca_file: Option<String>,
    /// Client port of etcd, and additional flags of it.
    pub etcd_port: u16,
    pub etcd_flags: &'a [&'a str],
}

/// An API server, running or not. Everything ends on drop.
#[derive(Debug)]
pub struct ApiServer {
    host: Host,
    directory: PathBuf,
    /// The command line.
    command: Vec<String>,
    kubectl: String,
    version: (String, u32),
    process: Option<Process>,
    etcd: Etcd,
}

impl ApiServer {
    /// Starts etcd and an API server on a host. Their data is in `directory`. The programs are those that the environment
    /// variables `VIPGATE_KUBE_APISERVER` and `VIPGATE_KUBECTL` name, else those of `PATH`.
    ///
    /// # Errors
    /// When a program is missing, or doesn't start in time.
    pub fn start(host: &Host, directory: &Path, config: Config<'_>) -> Result<Self, Error> {
        let program = program("VIPGATE_KUBE_APISERVER", "kube-apiserver");
        let kubectl = self::program("VIPGATE_KUBECTL", "kubectl");
        let version = output(&[&program, "--version"]).map_err(|_| Error::NoApiServer(program.clone()))?;
        let version = version.trim().trim_start_matches("Kubernetes ").to_owned();
        let minor = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(u32::MAX);
        output(&[&kubectl, "version", "--client"])?;
        write_credentials(directory, &config)?;
        let etcd = Etcd::start(host, config.etcd_port, directory, config.etcd_flags)?;
        let mut server = Self {
            command: command(program, directory, etcd.endpoint(), minor, config),
            host: host.clone(),
            directory: directory.to_owned(),
            kubectl,
            version: (version, minor),
            process: None,
            etcd,
        };
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

    /// Path of a user's kubeconfig.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        kubeconfig_file(&self.directory, user)
    }

    /// Runs `kubectl` as a user on the host; its stdout.
    ///
    /// # Errors
    /// When it fails.
    pub fn kubectl(&self, user: &str, arguments: &[&str]) -> Result<String, Error> {
        // It caches discovery by address and port below HOME: each server needs its own.
        let home = format!("HOME={}", self.directory.display());
        let kubeconfig = format!("KUBECONFIG={}", self.kubeconfig(user).display());
        self.host.output(&[&["env", &home, &kubeconfig, &self.kubectl], arguments].concat())
    }

    /// The command line of `kubectl` as a user from the machine that the host is on.
    pub fn kubectl_command(&self, user: &str) -> String {
        let (netns, kubeconfig) = (self.host.netns(), self.kubeconfig(user));
        format!("ip netns exec {netns} {} --kubeconfig {}", self.kubectl, kubeconfig.display())
    }

    /// Applies manifests as a user; fields that the server doesn't know are errors if `validation` is `strict`, and are
    /// dropped if it is `ignore`.
    ///
    /// # Errors
    /// When they can't be applied.
    pub fn apply(&self, user: &str, validation: &str, manifests: &str) -> Result<(), Error> {
        let unwritable = |source| Error::Write { file: self.directory.display().to_string(), source };
        let file = NamedTempFile::new_in(&self.directory).map_err(unwritable)?;
        fs::write(file.path(), manifests).map_err(unwritable)?;
        let (validation, path) = (format!("--validate={validation}"), file.path().display().to_string());
        self.kubectl(user, &["apply", &validation, "-f", &path]).map(drop)
    }

    /// Kills the API server with SIGKILL. etcd goes on.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn kill(&mut self) -> Result<(), Error> {
        let mut process = self.process.take().ok_or(Error::Removed)?;
        process.stop("KILL", Duration::from_secs(5)).map(drop)
    }

    /// Starts the API server again, with its data in etcd, and waits until it is ready.
    ///
    /// # Errors
    /// When it doesn't start in time.
    pub fn resume(&mut self) -> Result<(), Error> {
        let command: Vec<&str> = self.command.iter().map(String::as_str).collect();
        let mut process = self.host.spawn(&command, &self.directory.join("kube-apiserver.log"))?;
        process.wait_ready(START_TIMEOUT, || self.kubectl(ADMIN, &["get", "--raw", "/readyz"]).is_ok())?;
        self.process = Some(process);
        Ok(())
    }

    /// The member of etcd that has its objects.
    pub fn etcd(&mut self) -> &mut Etcd {
        &mut self.etcd
    }
}

/// The command line of kube-apiserver.
fn command(program: String, directory: &Path, etcd: &str, minor: u32, config: Config<'_>) -> Vec<String> {
    let path = |file: &str| directory.join(file).display().to_string();
    let [private, public] = KEY_FILES.map(path);
    let mut command = vec![
        program,
        format!("--etcd-servers={etcd}"),
        // Without it, it searches a default route for an address.
        format!("--advertise-address={}", config.address),
        format!("--bind-address={}", config.address),
        "--secure-port=6443".to_owned(),
        format!("--cert-dir={}", path("certificates")),
        format!("--token-auth-file={}", path("tokens.csv")),
        "--authorization-mode=RBAC".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16,fd96::/112".to_owned(),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-signing-key-file={private}"),
        format!("--service-account-key-file={public}"),
        // Pods need no service account, which a controller would create.
        "--disable-admission-plugins=ServiceAccount".to_owned(),
        "--endpoint-reconciler-type=none".to_owned(),
    ];
    if minor <= LAST_WITHOUT_SLICES {
        // The built-in version would hide the custom resource.
        command.extend([FEATURES, "--runtime-config=discovery.k8s.io/v1beta1=false"].map(str::to_owned));
    }
    command.extend(config.flags);
    command
}

/// Writes the key that signs service account tokens, the users' tokens, and kubeconfigs with them.
fn write_credentials(directory: &Path, config: &Config<'_>) -> Result<(), Error> {
    let key = KeyPair::generate()
        .map_err(|error| Error::Failed { command: "generating a key".to_owned(), output: error.to_string() })?;
    let [private, public] = KEY_FILES.map(|file| directory.join(file));
    let user = |(number, (name, groups)): (usize, &(&str, &str))| {
        let groups = if groups.is_empty() { String::new() } else { format!(",{groups}") };
        format!("{name},{name},{number}{groups}\n")
    };
    let tokens = config.users.iter().enumerate().map(user).collect::<Vec<_>>().concat();
    let mut files =
        vec![(private, key.serialize_pem()), (public, key.public_key_pem()), (directory.join("tokens.csv"), tokens)];
    // The certificate that it creates itself has that of the CA, too.
    let own_ca = || directory.join("certificates/apiserver.crt").display().to_string();
    let ca_file = config.ca_file.clone().unwrap_or_else(own_ca);
    for (user, _) in config.users {
        files.push((kubeconfig_file(directory, user), kubeconfig(config.address, &ca_file, user)));
    }
    for (file, text) in files {
        fs::write(&file, text).map_err(|source| Error::Write { file: file.display().to_string(), source })?;
    }
    Ok(())
}

fn kubeconfig_file(directory: &Path, user: &str) -> PathBuf {
    directory.join(format!("{user}.kubeconfig"))
}

/// A kubeconfig for an API server at an address, of a user whose bearer token is its name.
fn kubeconfig(address: &str, ca_file: &str, user: &str) -> String {
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters: [{{name: lab, cluster: {{server: \"https://{address}:6443\", certificate-authority: {ca_file}}}}}]\n\
         users: [{{name: {user}, user: {{token: {user}}}}}]\n\
         contexts: [{{name: lab, context: {{cluster: lab, user: {user}}}}}]\n\
         current-context: lab\n"
    )
}

/// The program that an environment variable names, or this one of `PATH`.
fn program(variable: &str, name: &str) -> String {
    env::var(variable).unwrap_or_else(|_| name.to_owned())
}
