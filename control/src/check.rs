//! `vipgate check PATH...`: everything that is wrong with configuration and manifests, without running anything.
//!
//! A path is a `gateway.yaml`, a `policyd.yaml`, or manifests: a file or a directory. What a file is shows in its fields,
//! so that a whole tree of configuration can be checked at once. Manifests are compiled together, as a gateway would.

mod files;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use vipgate_dataplane::snapshot::spec::PolicySet;

use crate::complaint::{Complaint, settle};
use crate::config::{Config, PolicydConfig};
use crate::manifest::files::walk;
use crate::manifest::{Foreign, Manifests, read};
use crate::policy::{Viewer, compile};
use crate::text_file::named_text;
use crate::xds::resource::version_of;
use crate::yaml::{Fault, Source};

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// What is wrong, in the order of files and lines.
    pub complaints: Vec<Complaint>,
    /// Configuration files that are fine.
    pub configurations: Vec<Configuration>,
    /// What the manifests come to; none when there were none.
    pub policy: Option<Summary>,
}

/// A Service that is reached at VIPs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Inbound {
    /// As people name it.
    pub name: String,
    /// Addresses behind it.
    pub backends: usize,
}

/// A configuration file that is fine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Configuration {
    /// The file.
    pub file: String,
    /// `gateway NAME` or `policyd`.
    pub what: String,
}

/// What manifests come to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Files that manifests were read from.
    pub files: usize,
    /// Objects by kind.
    pub objects: BTreeMap<&'static str, usize>,
    /// Version of the compiled policy.
    pub version: String,
    /// VIPs, as text, and whose they are.
    pub vips: Vec<Vip>,
    /// The policies, and what each covers.
    pub policies: Vec<Policy>,
    /// The Services that are reached at VIPs, and what is behind each.
    pub services: Vec<Inbound>,
    /// Covered pod addresses.
    pub endpoints: usize,
    /// Those among them that have no VIP, so that their traffic is dropped.
    pub closed: usize,
}

/// A VIP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Vip {
    /// The address.
    pub address: String,
    /// Whose it is.
    pub name: String,
    /// Ports that are never given out as SNAT ports.
    pub reserved_ports: Vec<u16>,
}

/// A policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// `EgressPolicy namespace/name` or `Service namespace/name`.
    pub name: String,
    /// Pod addresses that it covers and wins.
    pub endpoints: usize,
}

impl Report {
    /// How many complaints are errors.
    pub fn errors(&self) -> usize {
        self.complaints.iter().filter(|complaint| complaint.is_error()).count()
    }

    /// The exit code of the command: 0 when there is no error, else 2.
    pub fn exit_code(&self) -> u8 {
        if self.errors() == 0 { 0 } else { 2 }
    }
}

/// Checks files and directories.
pub fn run(paths: &[PathBuf]) -> Report {
    run_in(Path::new(""), paths)
}

/// The same where relative paths inside configurations begin at `folder`.
fn run_in(folder: &Path, paths: &[PathBuf]) -> Report {
    let mut report = Report::default();
    let mut gateways = Vec::new();
    let mut manifests = Manifests::default();
    let mut files = 0;
    let found = walk(paths);
    for (path, error) in found.failures {
        report.complaints.push(Complaint::about_file(&path.display().to_string(), format!("can't be read: {error}")));
    }
    for path in found.files {
        let name = path.display().to_string();
        let text = match named_text(&path) {
            Ok(text) => text,
            Err(error) => {
                report.complaints.push(Complaint::about_file(&name, format!("can't be read: {error}")));
                continue;
            }
        };
        // A file that was named itself is taken for configuration more easily than one that was found somewhere.
        let source = Arc::new(Source::new(&name, text));
        let (what, found) = match kind(&source, paths.contains(&path)) {
            File::Gateway => match Config::from_source(&source) {
                Ok(config) => {
                    let what = format!("gateway {}", config.name);
                    gateways.push(Viewer::of(&config));
                    (what, complaints(&source, files::gateway(&config, folder)))
                }
                Err(complaints) => (String::new(), complaints.0),
            },
            File::Policyd => match PolicydConfig::from_source(&source) {
                Ok(config) => ("policyd".to_owned(), complaints(&source, files::policyd(&config, folder))),
                Err(complaints) => (String::new(), complaints.0),
            },
            File::Manifests => {
                files += 1;
                read(&source, Foreign::IgnoreOthers, &mut manifests);
                continue;
            }
        };
        if found.iter().all(|it| !it.is_error()) {
            report.configurations.push(Configuration { file: name, what });
        }
        report.complaints.extend(found);
    }
    if files > 0 {
        // With one gateway the question is what that one would do, else what all of them would.
        let gateway = if gateways.len() == 1 { gateways.pop() } else { None };
        let compiled = compile(&manifests.objects);
        let set = compiled.deal.part_of(gateway.as_ref(), &version_of(&compiled.deal));
        report.policy = Some(summary(files, &manifests, &set));
        report.complaints.extend(manifests.complaints);
        report.complaints.extend(compiled.complaints);
    }
    settle(&mut report.complaints);
    report
}

/// Findings in a configuration, where its fields are.
fn complaints(source: &Source, findings: Vec<files::Finding>) -> Vec<Complaint> {
    let Some(node) = source.first_document() else { return Vec::new() };
    let complaint = |files::Finding { field, severity, reason }| {
        let fault = Fault { at: node.locate(&field), field, reason };
        Complaint { severity, ..source.complaint(fault) }
    };
    findings.into_iter().map(complaint).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum File {
    Gateway,
    Policyd,
    Manifests,
}

/// What a file is, by the fields of its first document.
fn kind(source: &Source, named: bool) -> File {
    let Some(node) = source.first_document() else { return File::Manifests };
    let has = |fields: &[&str]| fields.iter().any(|field| node.get(field).is_some());
    if has(&["apiVersion", "kind", "metadata", "spec", "items"]) {
        File::Manifests
    } else if has(&["listen", "source", "tls"]) {
        File::Policyd
    } else if named || has(&["interfaces", "policy"]) {
        File::Gateway
    } else {
        File::Manifests
    }
}

fn summary(files: usize, manifests: &Manifests, set: &PolicySet) -> Summary {
    let mut objects = BTreeMap::new();
    for object in &manifests.objects {
        *objects.entry(object.id.kind.as_str()).or_default() += 1;
    }
    let mut covered: BTreeMap<&str, usize> = set.policies.iter().map(|policy| (&*policy.name, 0)).collect();
    for endpoint in &set.endpoints {
        *covered.entry(&*endpoint.policy).or_default() += 1;
    }
    let policies = covered.into_iter().map(|(name, endpoints)| Policy { name: name.to_owned(), endpoints }).collect();
    let vips = set.vips.iter().map(|vip| Vip {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        reserved_ports: vip.reserved_ports.clone(),
    });
    let services = set.services.iter().map(|it| Inbound { name: it.name.to_string(), backends: it.backends.len() });
    Summary {
        files,
        objects,
        version: set.version.clone(),
        vips: vips.collect(),
        policies,
        services: services.collect(),
        endpoints: set.endpoints.len(),
        closed: set.endpoints.iter().filter(|endpoint| endpoint.vips.is_empty()).count(),
    }
}

/// VIPs, policies and Services that are listed one by one; of more than this only the number is told.
const LISTED: usize = 50;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Configuration { file, what } in &self.configurations {
            writeln!(f, "{file}: {what}: fine")?;
        }
        if let Some(policy) = &self.policy {
            policy.fmt(f)?;
        }
        let errors = self.errors();
        writeln!(f, "errors: {errors}, warnings: {}", self.complaints.len() - errors)
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
            self.closed,
            self.services.len()
        )?;
        if self.vips.len().max(self.policies.len()).max(self.services.len()) > LISTED {
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
            writeln!(f, "  inbound of {}: {} backends", service.name, service.backends)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
