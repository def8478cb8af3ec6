//! vipgate as a system under test: configuration, policy, process, and CLI.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use vipgate_lab::{Host, Process, READY};

use crate::wire::config::SutConfig;

/// Startup timeout of a gateway.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(20);

/// A configured gateway, which can be started repeatedly.
#[derive(Debug)]
pub(crate) struct Vipgate {
    program: PathBuf,
    config: PathBuf,
    socket: PathBuf,
    log: PathBuf,
}

impl Vipgate {
    /// Writes its configuration and manifests. `state` is the directory of the persistent session state, if any.
    pub(crate) fn configure(
        setting: &SutConfig,
        capacity: u32,
        state: Option<&Path>,
        policy: &PolicySource,
        directory: &Path,
    ) -> Result<Self> {
        let path = |name: &str| directory.join(name);
        let (config, manifests, socket) = (path("gateway.yaml"), path("policy.yaml"), path("gateway.sock"));
        let source = match policy {
            PolicySource::File => format!("files: [{}]", manifests.display()),
            PolicySource::Server(url) => {
                format!("server: {{url: \"{url}\", cache: {}}}", path("policy.cache").display())
            }
        };
        let state = state.map_or("null".into(), |state| state.display().to_string());
        let text = format!(
            "name: gw-bench\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n\
             workers: {{cores: {:?}}}\n\
             policy: {{{source}}}\n\
             sessions: {{capacity: {capacity}, state: {state}}}\n\
             admin: {{socket: {}}}\n\
             log: {{format: json}}\n",
            setting.cores,
            socket.display()
        );
        fs::write(&config, text)?;
        fs::write(&manifests, pod_manifests())?;
        Ok(Self { program: setting.gateway.clone(), config, socket, log: path("gateway.log") })
    }

    /// Starts it and waits until it logs `ready`.
    pub(crate) fn start(&self, host: &Host) -> Result<Process> {
        let [program, config] = [&self.program, &self.config].map(|path| path.display().to_string());
        let mut process = host.spawn(&[&program, "gateway", "--config", &config], &self.log)?;
        process.wait_for_log(READY, STARTUP_TIMEOUT)?;
        Ok(process)
    }

    /// Runs a CLI command without arguments; returns its JSON output.
    pub(crate) fn query(&self, command: &str) -> Result<serde_json::Value> {
        self.run_command(&[command])
    }

    /// Runs a CLI command; returns its JSON output.
    pub(crate) fn run_command(&self, command: &[&str]) -> Result<serde_json::Value> {
        let [program, socket] = [&self.program, &self.socket].map(|path| path.display().to_string());
        let output = vipgate_lab::output(
            &[&[program.as_str()], command, &["--socket", socket.as_str(), "--output", "json"]].concat(),
        )?;
        serde_json::from_str(&output).with_context(|| format!("`vipgate {}` printed no JSON", command.join(" ")))
    }

    /// The first log line with this event since the last start.
    pub(crate) fn log_event(&self, event: &str) -> Result<Option<serde_json::Value>> {
        let log = fs::read_to_string(&self.log)?;
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        Ok(lines.find(|line| line["event"] == event))
    }
}

#[derive(Debug)]
pub(crate) enum PolicySource {
    /// A manifest file with a Service of the source's pods.
    File,
    /// A policy server at this URL in the gateway's namespace.
    Server(String),
}

/// Manifests of a Service with the VIP, and its endpoints: the source's pods.
fn pod_manifests() -> String {
    let mut text = String::from(
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: bench}\n---\n\
         apiVersion: v1\nkind: Service\n\
         metadata: {name: api, namespace: bench, annotations: {vipgate.io/egress: \"true\"}}\n\
         spec: {type: LoadBalancer, ports: [{name: http, port: 80, targetPort: 8080, protocol: TCP}]}\n\
         status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}\n",
    );
    for part in 4..8 {
        let _ = write!(
            text,
            "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: api-{part}, namespace: bench, labels: {{kubernetes.io/service-name: api}}}}\n\
             addressType: IPv4\nports: [{{name: http, port: 8080, protocol: TCP}}]\nendpoints:\n"
        );
        for pod in 0..=255 {
            let _ = writeln!(text, "  - {{addresses: [10.1.{part}.{pod}], conditions: {{ready: true}}}}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pod_of_the_source_is_in_the_manifests() {
        let text = pod_manifests();
        for pod in ["10.1.4.0]", "10.1.5.77]", "10.1.7.255]"] {
            assert_eq!(text.matches(pod).count(), 1, "{pod}");
        }
        assert_eq!(text.matches("ready: true").count(), 1024);
    }
}
