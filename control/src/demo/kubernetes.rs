//! The first scenario with a Kubernetes API server in place of files: Services get addresses from a pool, and `kubectl`
//! changes the policy of a running gateway.

use std::fs;
use std::time::{Duration, Instant};

use vipgate_lab::api_server::{ADMIN, ADMINISTRATORS, ApiServer, Config, ENDPOINT_SLICES};
use vipgate_lab::networks::SERVER;
use vipgate_lab::reflector::query_udp;
use vipgate_lab::{Host, Lab};
use vipgate_policy::manifest::crd;

use super::report::Report;
use super::topology::{POLICY, Topology};
use super::{checks, wait_for};

use crate::command_error::CommandError;
use crate::demo::daemon::Daemon;

const POOL: &str = include_str!("../../../conf/demo/kubernetes/pool.yaml");
/// Addresses of the control plane and of the gateway in the network between them.
const CONTROL_PLANE: &str = "10.3.0.254";
const GATEWAY: &str = "10.3.0.1/24";
/// Address of the policy server.
const POLICYD: &str = "10.3.0.254:18000";
/// Limit of the time from `kubectl` to the effect.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// API server and policy server of the scenario.
#[derive(Debug)]
pub(super) struct ControlPlane {
    host: Host,
    pub(super) api: ApiServer,
    policyd: Option<Daemon>,
}

impl ControlPlane {
    /// Starts an API server on a host of its own, and creates the objects of both tenants.
    pub(super) fn start(lab: &Lab, topology: &Topology, report: &mut Report) -> Result<Self, CommandError> {
        let host = lab.host("control-plane", false).map_err(CommandError::runtime)?;
        lab.link((&topology.gateway, "gw-mgmt"), (&host, "mgmt"), 1).map_err(CommandError::runtime)?;
        topology.gateway.addresses("gw-mgmt", &[GATEWAY]).map_err(CommandError::runtime)?;
        host.addresses("mgmt", &[&format!("{CONTROL_PLANE}/24")]).map_err(CommandError::runtime)?;
        let directory = topology.directory.path().join("kubernetes");
        fs::create_dir_all(&directory).map_err(CommandError::runtime)?;

        Report::section("The cluster's objects");
        let started = Instant::now();
        let config = Config {
            address: CONTROL_PLANE,
            users: &[(ADMIN, ADMINISTRATORS)],
            flags: Vec::new(),
            ca_file: None,
            etcd_port: 2379,
            etcd_flags: &["--unsafe-no-fsync"],
        };
        let api = ApiServer::start(&host, &directory, config).map_err(CommandError::runtime)?;
        report.check(&format!("kube-apiserver {} is ready", api.version()), true, &after(started));
        let plane = Self { host, api, policyd: None };
        plane.create_objects(report)?;
        Ok(plane)
    }

    fn create_objects(&self, report: &mut Report) -> Result<(), CommandError> {
        self.apply(&crd::yaml().map_err(CommandError::runtime)?)?;
        if self.api.lacks_endpoint_slices() {
            self.apply(ENDPOINT_SLICES)?;
        }
        self.kubectl(&["wait", "--for=condition=Established", "--timeout=20s", "crd", "--all"])?;
        report.check("vipgate's kinds are established", true, "");
        self.apply(POOL)?;
        for (_, manifest) in POLICY {
            self.apply(manifest)?;
        }
        // Tenant A leaves the choice to the pool.
        let [four, six] = ["203.0.113.20", "2001:db8:113::20"];
        self.kubectl(&["-n", "tenant-b", "annotate", "service", "web", &format!("vipgate.io/addresses={four},{six}")])?;
        let services = self.kubectl(&["get", "services", "-A", "--no-headers"])?;
        report.check("a pool and the objects of both tenants", true, &format!("{} Services", services.lines().count()));
        Ok(())
    }

    /// Starts the policy server; it gives the Services their addresses.
    pub(super) fn start_policyd(&mut self, topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
        let config = format!(
            "listen: \"{POLICYD}\"\n\
             source: {{kubernetes: {{kubeconfig: {}}}}}\n\
             metrics: {{listen: \"127.0.0.1:9470\"}}\n\
             log: {{format: json}}\n",
            self.api.kubeconfig(ADMIN).display()
        );
        let started = Instant::now();
        let policyd = Daemon::start(&self.host, "policyd", &config, topology.directory.path())?;
        self.policyd.insert(policyd).wait_ready()?;
        for (namespace, service, vips) in
            [("tenant-a", "api", topology.pods[0].vips), ("tenant-b", "web", topology.pods[2].vips)]
        {
            let path = "-o=jsonpath={.status.loadBalancer.ingress[*].ip}";
            let get = || self.kubectl(&["-n", namespace, "get", "service", service, path]).unwrap_or_default();
            let mut addresses = String::new();
            let has_all = || {
                addresses = get();
                vips.iter().all(|vip| addresses.split(' ').any(|address| address == *vip))
            };
            let has_all = wait_for(has_all);
            let what = format!("Service {namespace}/{service} has its addresses");
            report.check(&what, has_all, &format!("{addresses}, {}", after(started)));
        }
        self.print(&["get", "services", "-A"])
    }

    /// `policy` of a gateway that follows the policy server.
    pub(super) fn policy(topology: &Topology) -> String {
        let cache = topology.directory.path().join("policy.cache");
        format!("{{server: {{url: \"http://{POLICYD}\", cache: {}}}}}", cache.display())
    }

    /// `kubectl` changes the policy, and packets follow; without the API server they go on.
    pub(super) fn change_policy(&mut self, topology: &Topology, report: &mut Report) -> Result<(), CommandError> {
        let (pod, [_, tenant_b]) = (&topology.pods[2], POLICY);
        Report::section("kubectl changes the policy");
        let deleted = Instant::now();
        self.kubectl(&["-n", "tenant-b", "delete", "egresspolicy", "web", "--wait=false"])?;
        let seen_as = |expected: &'static str| {
            let server = SERVER[0].parse().map_err(CommandError::runtime)?;
            let is_seen = || query_udp(&pod.host, server).is_ok_and(|source| source == expected);
            Ok::<_, CommandError>(wait_for(is_seen))
        };
        let holds = seen_as(pod.addresses[0])? && deleted.elapsed() < MAX_DELAY;
        report.check("delete egresspolicy web: pod-b1 has no VIP", holds, &after(deleted));
        let applied = Instant::now();
        self.apply(tenant_b.1)?;
        let holds = seen_as(pod.vips[0])? && applied.elapsed() < MAX_DELAY;
        report.check("apply: pod-b1 leaves with its VIP again", holds, &after(applied));

        let condition = "--for=condition=Programmed";
        let programmed = self.kubectl(&["-n", "tenant-b", "wait", "egresspolicy/web", condition, "--timeout=10s"]);
        report.check("EgressPolicy web has the condition Programmed", programmed.is_ok(), &after(applied));
        for kinds in ["egresspolicies", "addresspools", "events"] {
            self.print(&["get", kinds, "-A"])?;
        }

        Report::section("Without the API server");
        self.api.kill().map_err(CommandError::runtime)?;
        let holds = seen_as(pod.vips[0])?;
        report.check("kill -9 of kube-apiserver: pod-b1 keeps its VIP", holds, "");
        let restarted = Instant::now();
        self.api.resume().map_err(CommandError::runtime)?;
        let holds = seen_as(pod.vips[0])?;
        report.check("kube-apiserver runs again", holds, &after(restarted));
        Ok(())
    }

    /// Stops the policy server.
    pub(super) fn stop(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let stopped = self.policyd.take().map_or(Ok(true), Daemon::stop)?;
        report.check("SIGTERM stops the policy server cleanly", stopped, "");
        Ok(())
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String, CommandError> {
        self.api.kubectl(ADMIN, arguments).map_err(CommandError::runtime)
    }

    fn apply(&self, manifests: &str) -> Result<(), CommandError> {
        self.api.apply(ADMIN, "ignore", manifests).map_err(CommandError::runtime)
    }

    /// Prints a command and its output.
    fn print(&self, arguments: &[&str]) -> Result<(), CommandError> {
        Report::output(&format!("kubectl {}", arguments.join(" ")), &self.kubectl(arguments)?);
        Ok(())
    }
}

/// Runs the scenario; leaves its processes running.
pub(super) fn run(lab: &Lab, topology: &mut Topology, report: &mut Report) -> Result<ControlPlane, CommandError> {
    let mut plane = ControlPlane::start(lab, topology, report)?;
    plane.start_policyd(topology, report)?;
    topology.start_gateway(&ControlPlane::policy(topology))?;
    checks::run(topology, report)?;
    plane.change_policy(topology, report)?;
    Ok(plane)
}

fn after(start: Instant) -> String {
    format!("after {:.1} s", start.elapsed().as_secs_f64())
}
