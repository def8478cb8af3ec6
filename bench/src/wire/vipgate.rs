//! vipgate as it is measured: its configuration, its policy, its process.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::subject::Setting;
use crate::netns::{self, Namespace};

/// How long a gateway may take to come up.
const PATIENCE: Duration = Duration::from_secs(20);

/// A gateway that is configured, and may be started again and again.
#[derive(Debug)]
pub(crate) struct Vipgate {
    program: PathBuf,
    config: PathBuf,
    socket: PathBuf,
    log: PathBuf,
}

impl Vipgate {
    /// Writes its files. `state` is the folder of what outlives the process, if anything should.
    pub(crate) fn configure(
        setting: &Setting,
        capacity: u32,
        state: Option<&Path>,
        policy: &Policy,
        folder: &Path,
    ) -> Result<Self> {
        let at = |name: &str| folder.join(name);
        let (config, manifests, socket) = (at("gateway.yaml"), at("policy.yaml"), at("gateway.sock"));
        let source = match policy {
            Policy::Pods => format!("files: [{}]", manifests.display()),
            Policy::Server(url) => format!("server: {{url: \"{url}\", cache: {}}}", at("policy.cache").display()),
        };
        let state = state.map_or("null".into(), |state| state.display().to_string());
        let text = format!(
            "name: gw-bench\n\
             interfaces:\n  - {{name: gw-in, role: inside}}\n  - {{name: gw-out, role: outside}}\n\
             workers: {{cores: [{}]}}\n\
             policy: {{{source}}}\n\
             sessions: {{capacity: {capacity}, state: {state}}}\n\
             admin: {{socket: {}}}\n\
             log: {{format: json}}\n",
            setting.core,
            socket.display()
        );
        fs::write(&config, text)?;
        fs::write(&manifests, pods())?;
        Ok(Self { program: setting.gateway.clone(), config, socket, log: at("gateway.log") })
    }

    /// Starts it and waits until it says that it is ready.
    pub(crate) fn start(&self, host: &Namespace) -> Result<Child> {
        let [program, config] = [&self.program, &self.config].map(|path| path.display().to_string());
        let mut process = host.spawn(&[&program, "gateway", "--config", &config], &self.log)?;
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until && matches!(process.try_wait(), Ok(None)) {
            if self.said("ready")?.is_some() {
                return Ok(process);
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = process.kill();
        let _ = process.wait();
        bail!(
            "the gateway did not become ready; it said:\n{}",
            fs::read_to_string(&self.log).unwrap_or_default().trim()
        )
    }

    /// What it answers to a command of its command line.
    pub(crate) fn ask(&self, command: &str) -> Result<serde_json::Value> {
        self.run(&[command])
    }

    /// The same of one with arguments.
    pub(crate) fn run(&self, command: &[&str]) -> Result<serde_json::Value> {
        let [program, socket] = [&self.program, &self.socket].map(|path| path.display().to_string());
        let answer = netns::output(
            &[&[program.as_str()], command, &["--socket", socket.as_str(), "--output", "json"]].concat(),
        )?;
        serde_json::from_str(&answer).with_context(|| format!("`vipgate {}` prints no JSON", command.join(" ")))
    }

    /// The first thing that it has said of this kind since it was started.
    pub(crate) fn said(&self, event: &str) -> Result<Option<serde_json::Value>> {
        let log = fs::read_to_string(&self.log)?;
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        Ok(lines.find(|line| line["event"] == event))
    }
}

/// Where its policy comes from.
#[derive(Debug)]
pub(crate) enum Policy {
    /// A file with the Service of the pods that the source plays.
    Pods,
    /// A policy server that listens at this URL in the gateway's namespace.
    Server(String),
}

/// A Service with the VIP, and the pods behind it that the source plays.
fn pods() -> String {
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
        let text = pods();
        for pod in ["10.1.4.0]", "10.1.5.77]", "10.1.7.255]"] {
            assert_eq!(text.matches(pod).count(), 1, "{pod}");
        }
        assert_eq!(text.matches("ready: true").count(), 1024);
    }
}
