//! Configuration files: `gateway.yaml`, `policyd.yaml` and `node.yaml`.
//!
//! The types are the schema: other values are rejected with file, line, field and reason. Relative paths are relative
//! to the current directory.

mod cloud;
mod gateway;
mod health;
mod nat_log;
mod node;
mod policyd;
mod privileges;
mod services;
pub(crate) mod units;
mod validate;

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use vipgate_policy::diagnostic::{Code, Diagnostic, Diagnostics, Severity, sort_and_dedup};
use vipgate_policy::yaml::{self, Node, Source};

pub use self::cloud::{CloudConfig, CloudEndpoints};
pub use self::gateway::{
    Admin, Bgp, Config, Idle, Interface, InterfaceRole, Log, LogFormat, LogLevel, Metrics, OnExit, Overlay, Peer,
    PolicyServer, PolicySource, Ports, Sessions, Timeouts, Workers, Xdp, XdpMode, ZeroCopy,
};
pub use self::health::{Health, HealthTarget, LinkRequirement};
pub use self::nat_log::{NatLog, NatLogTransport};
pub use self::node::{NodeConfig, NodePolicyServer, NodeRouting, NodeTunnel};
pub use self::policyd::{
    Etcd, HandledServices, KubernetesSource, LeaseName, Leases, ListMode, MembershipLimits, NodeAgentsConfig,
    PodTokens, PodWatch, PolicydConfig, PolicydLimits, PolicydSource, Tls, Unclassed,
};
pub use self::privileges::{Privileges, Seccomp};
pub use self::services::{DenyAction, Services};
pub use self::units::{MaxUnavailable, PortRange};
use crate::text_file::named_text;

/// Validation beyond the types of the fields.
trait Validate {
    /// Reports each error as (code, field, reason).
    fn validate(&self, report: &mut validate::Report<'_>);
}

/// Why a configuration can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file can't be read.
    #[error("{diagnostics}")]
    Unreadable {
        /// The message.
        diagnostics: Diagnostics,
        /// The I/O error.
        source: io::Error,
    },
    /// It has another content.
    #[error(transparent)]
    Invalid(#[from] Diagnostics),
}

impl Config {
    /// Reads a `gateway.yaml`.
    ///
    /// # Errors
    /// That it can't be read, or all errors in the file.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        load(path)
    }

    /// Reads a `gateway.yaml` from a text; diagnostics have `name` as file.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn parse(name: &str, text: &str) -> Result<Self, Diagnostics> {
        parse(&Source::new(name, text.to_owned()))
    }

    /// Reads a `gateway.yaml` from a source.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn from_source(source: &Source) -> Result<Self, Diagnostics> {
        parse(source)
    }
}

impl PolicydConfig {
    /// Reads a `policyd.yaml`.
    ///
    /// # Errors
    /// That it can't be read, or all errors in the file.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        load(path)
    }

    /// Reads a `policyd.yaml` from a text; diagnostics have `name` as file.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn parse(name: &str, text: &str) -> Result<Self, Diagnostics> {
        parse(&Source::new(name, text.to_owned()))
    }

    /// Reads a `policyd.yaml` from a source.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn from_source(source: &Source) -> Result<Self, Diagnostics> {
        parse(source)
    }
}

impl NodeConfig {
    /// Reads a `node.yaml`.
    ///
    /// # Errors
    /// That it can't be read, or all errors in the file.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        load(path)
    }

    /// Reads a `node.yaml` from a text; diagnostics have `name` as file.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn parse(name: &str, text: &str) -> Result<Self, Diagnostics> {
        parse(&Source::new(name, text.to_owned()))
    }

    /// Reads a `node.yaml` from a source.
    ///
    /// # Errors
    /// All errors in the file.
    pub fn from_source(source: &Source) -> Result<Self, Diagnostics> {
        parse(source)
    }
}

fn load<T: DeserializeOwned + Validate>(path: &Path) -> Result<T, LoadError> {
    let name = path.display().to_string();
    match named_text(path) {
        Ok(text) => Ok(parse(&Source::new(&name, text))?),
        Err(source) => {
            let reason = format!("can't be read: {source}");
            let diagnostics = Diagnostic::for_file(&name, Code::Unreadable, reason).into();
            Err(LoadError::Unreadable { diagnostics, source })
        }
    }
}

fn parse<T: DeserializeOwned + Validate>(source: &Source) -> Result<T, Diagnostics> {
    let (nodes, diagnostics) = source.documents();
    if !diagnostics.is_empty() {
        return Err(Diagnostics(diagnostics));
    }
    let node = match nodes.as_slice() {
        [node] => node,
        [] => return Err(Diagnostic::for_file(source.name(), Code::EmptyFile, "is empty").into()),
        [_, second, ..] => {
            let reason = "expected a single document";
            return Err(error(source, second, Code::SeveralDocuments, "", reason.into()).into());
        }
    };
    let value: T = yaml::decode(node).map_err(|fault| source.diagnostic(fault))?;
    let mut diagnostics = Vec::new();
    value.validate(&mut |code, field, reason| diagnostics.push(error(source, node, code, field, reason)));
    sort_and_dedup(&mut diagnostics);
    if diagnostics.is_empty() { Ok(value) } else { Err(Diagnostics(diagnostics)) }
}

fn error(source: &Source, node: &Node, code: Code, field: &str, reason: String) -> Diagnostic {
    let at = node.locate(field);
    let (file, field) = (source.name().clone(), field.to_owned());
    Diagnostic { file, line: at.line, column: at.column, field, severity: Severity::Error, reason, code, object: None }
}

#[cfg(test)]
mod tests;
