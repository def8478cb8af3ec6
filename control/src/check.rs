//! `vipgate check PATH...`: validates configuration and manifests, without running anything.
//!
//! A path is a `gateway.yaml`, a `policyd.yaml`, or manifests: a file or a directory. The fields of a file determine
//! its kind, so a whole tree of configuration can be checked at once. Manifests are compiled together, as by a gateway.

pub mod explain;
mod files;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use vipgate_policy::compiler::{
    Cluster, Compiled, NodeAgents, Options, Placement, Share, Tenancy, compile_for, lookup_table_bytes,
};
use vipgate_policy::diagnostic::{Code, Diagnostic, sort_and_dedup};
use vipgate_policy::manifest::{Manifests, UnsupportedKinds, read};
use vipgate_policy::yaml::{Source, YamlError};

use crate::config::{Config, NodeConfig, PolicydConfig};
use crate::source::manifest_files::walk;
use crate::text_file::named_text;
use crate::xds::resource::version_of;

/// Result of a check.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Diagnostics, in the order of files and lines.
    #[serde(rename = "diagnostics")]
    pub diagnostics: Vec<Diagnostic>,
    /// Valid configuration files.
    pub configurations: Vec<Configuration>,
    /// The compiled policy; none if there are no manifests.
    pub policy: Option<Summary>,
}

/// A Service with VIPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InboundService {
    /// `Service namespace/name`.
    pub name: String,
    /// Number of backends.
    pub backends: usize,
    /// Bytes of its Maglev tables at each gateway, at most.
    pub lookup_table_bytes: usize,
}

/// A valid configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Configuration {
    pub file: String,
    /// `gateway NAME` or `policyd`.
    #[serde(rename = "what")]
    pub role: String,
}

/// Summary of the compiled policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Files that manifests were read from.
    pub files: usize,
    /// Objects by kind.
    pub objects: BTreeMap<&'static str, usize>,
    /// Version of the compiled policy.
    pub version: String,
    /// VIPs with their owning objects.
    pub vips: Vec<Vip>,
    /// Egress policies with their number of endpoints.
    pub policies: Vec<Policy>,
    /// Services with VIPs and their number of backends.
    pub services: Vec<InboundService>,
    /// Covered pod addresses.
    pub endpoints: usize,
    /// Endpoints without a VIP: their packets are dropped.
    #[serde(rename = "closed")]
    pub without_vip: usize,
    /// Whether addresses of slices can't be checked, as strict tenancy wants it.
    pub slices_unverified: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Vip {
    pub address: String,
    /// The object that has it.
    pub name: String,
    /// Ports that are never allocated for SNAT.
    pub reserved_ports: Vec<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// `EgressPolicy namespace/name` or `Service namespace/name`.
    pub name: String,
    /// Number of covered pod addresses.
    pub endpoints: usize,
}

impl Report {
    /// Number of errors among the diagnostics.
    pub fn errors(&self) -> usize {
        self.diagnostics.iter().filter(|diagnostic| diagnostic.is_error()).count()
    }

    /// The exit code of the command: 0 when there is no error, else 2.
    pub fn exit_code(&self) -> u8 {
        if self.errors() == 0 { 0 } else { 2 }
    }
}

/// Checks files and directories. `tenancy`: `None` is that of the configuration files, see [`run_with_placement`].
pub fn run(paths: &[PathBuf], tenancy: Option<Tenancy>) -> Report {
    run_with_placement(paths, tenancy).0
}

/// Checks files and directories, with the placement of the policy; none if there are no manifests. It is valid only
/// without errors in the report. Without `tenancy`, that of the configuration files at the paths, if they have the same
/// one, else strict tenancy.
pub fn run_with_placement(paths: &[PathBuf], tenancy: Option<Tenancy>) -> (Report, Option<Placement>) {
    run_in(Path::new(""), paths, tenancy)
}

/// Checks files and directories; relative paths in configurations are relative to `base`.
fn run_in(base: &Path, paths: &[PathBuf], tenancy: Option<Tenancy>) -> (Report, Option<Placement>) {
    let mut placement = None;
    let mut report = Report::default();
    let mut settings = Settings::default();
    let mut manifests = Manifests::default();
    let mut files = 0;
    let found = walk(paths);
    for (path, error) in found.errors {
        report.diagnostics.push(unreadable(&path.display().to_string(), &error));
    }
    for path in found.files {
        let name = path.display().to_string();
        let text = match named_text(&path) {
            Ok(text) => text,
            Err(error) => {
                report.diagnostics.push(unreadable(&name, &error));
                continue;
            }
        };
        // A file given as an argument is configuration unless its fields say otherwise; one found in a directory needs
        // fields of a configuration.
        let source = Arc::new(Source::new(&name, text));
        let (what, found) = match kind(&source, paths.contains(&path)) {
            File::Gateway => settings.check_gateway(&source, base),
            File::Policyd => settings.check_policyd(&source, base),
            File::Node => check_node(&source, base),
            File::Manifests => {
                files += 1;
                read(&source, UnsupportedKinds::IgnoreOtherGroups, &mut manifests);
                continue;
            }
        };
        if found.iter().all(|it| !it.is_error()) {
            report.configurations.push(Configuration { file: name, role: what });
        }
        report.diagnostics.extend(found);
    }
    if files > 0 {
        let tenancy = tenancy.unwrap_or(settings.tenancy());
        let compiled = compile_for(settings.options(tenancy), &manifests.objects);
        report.policy = Some(summary(files, &manifests, &compiled));
        report.diagnostics.extend(manifests.diagnostics);
        report.diagnostics.extend(compiled.diagnostics);
        placement = Some(compiled.placement);
    }
    sort_and_dedup(&mut report.diagnostics);
    (report, placement)
}

/// What the configuration files say about the policy.
#[derive(Debug, Default)]
struct Settings {
    /// Of each file whose process compiles manifests.
    tenancies: Vec<Tenancy>,
    /// Of the last policy server that has some.
    node_agents: Option<NodeAgents>,
    /// Of the last policy server.
    namespace_share: Share,
    /// Of all of them.
    cluster: Cluster,
}

impl Settings {
    /// Checks a `gateway.yaml`: what it is, and its diagnostics.
    fn check_gateway(&mut self, source: &Source, base: &Path) -> (String, Vec<Diagnostic>) {
        let config = match Config::from_source(source) {
            Ok(config) => config,
            Err(errors) => return (String::new(), errors.0),
        };
        if config.files_tenancy().is_some() {
            self.cluster = std::mem::take(&mut self.cluster).merged_with(&config.locality().cluster);
        }
        self.tenancies.extend(config.files_tenancy());
        (format!("gateway {}", config.name), diagnostics(source, files::gateway(&config, base)))
    }

    /// Checks a `policyd.yaml`.
    fn check_policyd(&mut self, source: &Source, base: &Path) -> (String, Vec<Diagnostic>) {
        let config = match PolicydConfig::from_source(source) {
            Ok(config) => config,
            Err(errors) => return (String::new(), errors.0),
        };
        self.tenancies.push(config.tenancy);
        self.namespace_share = config.namespace_share;
        let cluster = Cluster::from_config(&config.pod_cidrs, &config.service_cidrs, config.uncovered);
        self.cluster = std::mem::take(&mut self.cluster).merged_with(&cluster);
        self.node_agents = config.node_agents.as_ref().map(|agents| agents.options(None)).or(self.node_agents);
        ("policyd".to_owned(), diagnostics(source, files::policyd(&config, base)))
    }

    /// Options of the compiler.
    fn options(&self, tenancy: Tenancy) -> Options {
        let Self { node_agents, namespace_share, ref cluster, .. } = *self;
        Options { tenancy, node_agents, namespace_share, cluster: cluster.clone(), recorded: None }
    }

    /// The tenancy of all files; strict if they differ.
    fn tenancy(&self) -> Tenancy {
        match self.tenancies[..] {
            [first, ref others @ ..] if others.iter().all(|other| *other == first) => first,
            _ => Tenancy::Strict,
        }
    }
}

/// Checks a `node.yaml`: what it is, and its diagnostics.
fn check_node(source: &Source, base: &Path) -> (String, Vec<Diagnostic>) {
    match NodeConfig::from_source(source) {
        Ok(config) => (format!("node {}", config.name), diagnostics(source, files::node(&config, base))),
        Err(errors) => (String::new(), errors.0),
    }
}

fn unreadable(name: &str, error: &io::Error) -> Diagnostic {
    Diagnostic::for_file(name, Code::Unreadable, format!("can't be read: {error}"))
}

/// Adds the lines of the fields to findings in a configuration.
fn diagnostics(source: &Source, findings: Vec<files::Finding>) -> Vec<Diagnostic> {
    let Some(node) = source.first_document() else { return Vec::new() };
    let diagnostic = |files::Finding { field, severity, reason, code }| {
        let fault = YamlError { position: node.locate(&field), field, reason, code };
        Diagnostic { severity, ..source.diagnostic(fault) }
    };
    findings.into_iter().map(diagnostic).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum File {
    Gateway,
    Policyd,
    Node,
    Manifests,
}

/// Kind of a file, by the fields of its first document.
fn kind(source: &Source, is_argument: bool) -> File {
    let Some(node) = source.first_document() else { return File::Manifests };
    let has = |fields: &[&str]| fields.iter().any(|field| node.get(field).is_some());
    if has(&["apiVersion", "kind", "metadata", "spec", "items"]) {
        File::Manifests
    } else if has(&["listen", "source", "tls"]) {
        File::Policyd
    } else if has(&["server", "tunnel", "mark_mask", "routing", "echo_interval"]) {
        File::Node
    } else if is_argument || has(&["interfaces", "policy"]) {
        File::Gateway
    } else {
        File::Manifests
    }
}

fn summary(files: usize, manifests: &Manifests, compiled: &Compiled) -> Summary {
    let placement = &compiled.placement;
    let mut objects = BTreeMap::new();
    for object in &manifests.objects {
        *objects.entry(object.id.kind.as_str()).or_default() += 1;
    }
    let mut covered: BTreeMap<&str, usize> = placement.policies.iter().map(|it| (&*it.name, 0)).collect();
    for endpoint in &placement.endpoints {
        *covered.entry(&*endpoint.policy).or_default() += 1;
    }
    let policies = covered.into_iter().map(|(name, endpoints)| Policy { name: name.to_owned(), endpoints }).collect();
    let vips = placement.vips.iter().map(|vip| Vip {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        reserved_ports: vip.reserved_ports.clone(),
    });
    let services = placement.services.iter().map(|it| InboundService {
        name: it.name.to_string(),
        backends: it.backends.len(),
        lookup_table_bytes: lookup_table_bytes(it),
    });
    Summary {
        files,
        objects,
        version: version_of(placement),
        vips: vips.collect(),
        policies,
        services: services.collect(),
        endpoints: placement.endpoints.len(),
        without_vip: placement.endpoints.iter().filter(|endpoint| endpoint.vips.is_empty()).count(),
        slices_unverified: compiled.slices_unverified,
    }
}

/// Limit of VIPs, policies and Services that are listed; of more, only their number is shown.
const MAX_LISTED: usize = 50;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Configuration { file, role: what } in &self.configurations {
            writeln!(f, "{file}: {what}: valid")?;
        }
        if let Some(policy) = &self.policy {
            policy.fmt(f)?;
        }
        let errors = self.errors();
        writeln!(f, "errors: {errors}, warnings: {}", self.diagnostics.len() - errors)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let objects: Vec<_> = self.objects.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        writeln!(f, "manifests in {} file(s): {}", self.files, objects.join(", "))?;
        writeln!(
            f,
            "policy {}: {} VIPs, {} policies, {} endpoints, {} of them without a VIP; {} Services",
            self.version,
            self.vips.len(),
            self.policies.len(),
            self.endpoints,
            self.without_vip,
            self.services.len()
        )?;
        if self.slices_unverified {
            writeln!(f, "  addresses of EndpointSlices aren't verified: there is no Pod among the manifests")?;
        }
        if self.vips.len().max(self.policies.len()).max(self.services.len()) > MAX_LISTED {
            return Ok(());
        }
        for vip in &self.vips {
            let ports: Vec<_> = vip.reserved_ports.iter().map(ToString::to_string).collect();
            let ports = if ports.is_empty() { String::new() } else { format!(", ports {}", ports.join(" ")) };
            writeln!(f, "  VIP {}: {}{ports}", vip.address, vip.name)?;
        }
        for policy in &self.policies {
            writeln!(f, "  egress of {}: {} endpoints", policy.name, policy.endpoints)?;
        }
        for service in &self.services {
            let InboundService { name, backends, lookup_table_bytes } = service;
            writeln!(f, "  inbound of {name}: {backends} backends, Maglev tables of {lookup_table_bytes} bytes")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
