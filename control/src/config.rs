//! The files that people configure vipgate with: `gateway.yaml` and `policyd.yaml`.
//!
//! The types are the schema: what they can't hold is refused with file, line, field and reason. Relative paths in them
//! are relative to the current directory.

mod gateway;
mod health;
mod nat_log;
mod policyd;
mod privileges;
mod services;
pub(crate) mod units;
mod verify;

pub use self::gateway::{
    Admin, Bgp, Config, Idle, Interface, InterfaceRole, Log, LogFormat, LogLevel, Metrics, OnExit, Overlay, Peer,
    PeerAuthentication, PolicyServer, PolicySource, Ports, Sessions, Timeouts, Workers, Xdp, XdpMode, ZeroCopy,
};
pub use self::health::{Health, HealthTarget, Require};
pub use self::nat_log::{NatLog, NatLogTransport};
pub use self::policyd::{Etcd, KubernetesSource, Leases, PolicydConfig, PolicydLimits, PolicydSource, Tls};
pub use self::privileges::{Privileges, Seccomp};
pub use self::services::{Services, Unserved};
pub use self::units::PortRange;

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::complaint::{Complaint, Complaints, Severity, settle};
use crate::text_file::named_text;
use crate::yaml::{self, Node, Source};

/// A configuration file that knows what of it can't be, beyond the shapes of its fields.
trait Verify {
    /// Reports each thing that can't be as (field, reason).
    fn verify(&self, report: &mut dyn FnMut(&str, String));
}

impl Config {
    /// Reads a `gateway.yaml`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(path: &Path) -> Result<Self, Complaints> {
        load(path)
    }

    /// Reads a `gateway.yaml` from a text that complaints call `name`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(name: &str, text: &str) -> Result<Self, Complaints> {
        parse(&Source::new(name, text.to_owned()))
    }

    /// Reads a `gateway.yaml` from a text that was read already.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_source(source: &Source) -> Result<Self, Complaints> {
        parse(source)
    }
}

impl PolicydConfig {
    /// Reads a `policyd.yaml`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn load(path: &Path) -> Result<Self, Complaints> {
        load(path)
    }

    /// Reads a `policyd.yaml` from a text that complaints call `name`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(name: &str, text: &str) -> Result<Self, Complaints> {
        parse(&Source::new(name, text.to_owned()))
    }

    /// Reads a `policyd.yaml` from a text that was read already.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn from_source(source: &Source) -> Result<Self, Complaints> {
        parse(source)
    }
}

fn load<T: DeserializeOwned + Verify>(path: &Path) -> Result<T, Complaints> {
    let name = path.display().to_string();
    match named_text(path) {
        Ok(text) => parse(&Source::new(&name, text)),
        Err(error) => Err(Complaint::about_file(&name, format!("can't be read: {error}")).into()),
    }
}

fn parse<T: DeserializeOwned + Verify>(source: &Source) -> Result<T, Complaints> {
    let (nodes, complaints) = source.documents();
    if !complaints.is_empty() {
        return Err(Complaints(complaints));
    }
    let node = match nodes.as_slice() {
        [node] => node,
        [] => return Err(Complaint::about_file(source.name(), "is empty").into()),
        [_, second, ..] => return Err(at(source, second, "", "only one document is expected here".into()).into()),
    };
    let value: T = yaml::decode(node).map_err(|fault| source.complaint(fault))?;
    let mut complaints = Vec::new();
    value.verify(&mut |field, reason| complaints.push(at(source, node, field, reason)));
    settle(&mut complaints);
    if complaints.is_empty() { Ok(value) } else { Err(Complaints(complaints)) }
}

fn at(source: &Source, node: &Node, field: &str, reason: String) -> Complaint {
    let at = node.locate(field);
    let (file, field) = (source.name().clone(), field.to_owned());
    Complaint { file, line: at.line, column: at.column, field, severity: Severity::Error, reason, object: None }
}

#[cfg(test)]
mod tests;
