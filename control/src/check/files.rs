//! Files that a configuration names: whether they are there, and hold what they should.

use std::path::{Path, PathBuf};

use crate::complaint::Severity;
use crate::config::{Config, PolicySource, PolicydConfig, PolicydSource};
use crate::xds::tls::{self, Names, Side, TlsError, Validity};

/// Something that is wrong with a field's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) field: String,
    pub(super) severity: Severity,
    pub(super) reason: String,
}

impl Finding {
    fn error(field: String, reason: &impl ToString) -> Self {
        Self { field, severity: Severity::Error, reason: reason.to_string() }
    }

    fn warning(field: String, reason: String) -> Self {
        Self { field, severity: Severity::Warning, reason }
    }
}

/// What is wrong with files that a `gateway.yaml` names; relative ones are in `folder`.
pub(super) fn gateway(config: &Config, folder: &Path) -> Vec<Finding> {
    match &config.policy {
        PolicySource::Files(paths) => sources("policy.files", paths, folder),
        PolicySource::Server(server) => {
            let own = server.cert.as_deref().zip(server.key.as_deref());
            let mut found = tls_files("policy.server", Side::Client, server.ca.as_deref(), own, folder);
            let names = server.cert.as_ref().and_then(|cert| Names::of_file(&folder.join(cert)).ok());
            if let Some(names) = names.filter(|names| !names.include(&config.name)) {
                let name = &config.name;
                let reason =
                    format!("the certificate is of {names}, not of {name}: a policy server with `tls.ca` refuses it");
                found.push(Finding::warning("policy.server.cert".to_owned(), reason));
            }
            found
        }
    }
}

/// The same for a `policyd.yaml`.
pub(super) fn policyd(config: &PolicydConfig, folder: &Path) -> Vec<Finding> {
    let mut found = match &config.source {
        PolicydSource::Files(paths) => sources("source.files", paths, folder),
        PolicydSource::Etcd(_) | PolicydSource::Kubernetes(_) => Vec::new(),
    };
    if let Some(tls) = &config.tls {
        found.extend(tls_files("tls", Side::Server, tls.ca.as_deref(), Some((&tls.cert, &tls.key)), folder));
    }
    found
}

/// Files and folders that manifests are read from.
fn sources(field: &str, paths: &[PathBuf], folder: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    for (i, path) in paths.iter().enumerate() {
        if let Err(error) = folder.join(path).metadata() {
            let reason = format!("{}: can't be read: {error}", path.display());
            found.push(Finding::error(format!("{field}[{i}]"), &reason));
        }
    }
    found
}

/// Files of TLS: each by itself, then together.
fn tls_files(field: &str, side: Side, ca: Option<&Path>, own: Option<(&Path, &Path)>, folder: &Path) -> Vec<Finding> {
    let at = |path: &Path| folder.join(path);
    let (ca, own) = (ca.map(at), own.map(|(cert, key)| (at(cert), at(key))));
    let of = |name: &str| format!("{field}.{name}");
    let mut found = Vec::new();
    let mut dates = |name: &str, validity: Result<Vec<Validity>, TlsError>| match validity {
        Ok(all) => {
            let wrong = all.iter().filter_map(Validity::complaint);
            found.extend(wrong.map(|reason| Finding::warning(of(name), reason)));
        }
        Err(error) => found.push(Finding::error(of(name), &error)),
    };
    if let Some(ca) = &ca {
        dates("ca", tls::check_authorities(ca));
    }
    if let Some((cert, key)) = &own {
        dates("cert", tls::check_certificates(cert));
        found.extend(tls::check_key(key).err().map(|error| Finding::error(of("key"), &error)));
    }
    let is_readable = found.iter().all(|it| it.severity == Severity::Warning);
    if is_readable && (ca.is_some() || own.is_some()) {
        let own = own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        found.extend(side.check(ca.as_deref(), own).err().map(|error| Finding::error(of("cert"), &error)));
    }
    found
}
