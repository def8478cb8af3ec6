//! Files that a configuration refers to: existence, readability, TLS contents.

use std::path::{Path, PathBuf};

use vipgate_policy::diagnostic::{Code, Severity};

use crate::config::{Config, KubernetesSource, NodeConfig, PolicyServer, PolicySource, PolicydConfig, PolicydSource};
use crate::xds::tls::{self, CertificateNames, Side, TlsError, Validity};

/// A problem with the file of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) field: String,
    pub(super) severity: Severity,
    pub(super) reason: String,
    pub(super) code: Code,
}

impl Finding {
    fn error(field: String, error: &TlsError) -> Self {
        let code = match error {
            TlsError::Unreadable { .. } => Code::Unreadable,
            TlsError::Invalid { .. } => Code::InvalidTlsFile,
            TlsError::Unusable { .. } => Code::UnusableCertificate,
            TlsError::NoRoots(_) => Code::NoSystemAuthorities,
        };
        Self { field, severity: Severity::Error, reason: error.to_string(), code }
    }

    fn warning(code: Code, field: String, reason: String) -> Self {
        Self { field, severity: Severity::Warning, reason, code }
    }
}

/// Checks the files of a `gateway.yaml`; relative paths are relative to `base`.
pub(super) fn gateway(config: &Config, base: &Path) -> Vec<Finding> {
    match &config.policy {
        PolicySource::Files(paths) => sources("policy.files", paths, base),
        PolicySource::Server(server) => connection("policy.server", server, &config.name, base),
    }
}

/// Checks the files of a `node.yaml`.
pub(super) fn node(config: &NodeConfig, base: &Path) -> Vec<Finding> {
    connection("server", &config.server.connection(), &config.name, base)
}

/// Checks the files of a connection to a policy server, whose client has this name.
fn connection(field: &str, server: &PolicyServer, name: &str, base: &Path) -> Vec<Finding> {
    let own = server.cert.as_deref().zip(server.key.as_deref());
    let mut found = tls_files(field, Side::Client, server.ca.as_deref(), own, base);
    let names = server.cert.as_ref().and_then(|cert| CertificateNames::from_file(&base.join(cert)).ok());
    if let Some(names) = names.filter(|names| !names.contains(name)) {
        let reason = format!("the certificate is of {names}, not of {name}: a policy server with `tls.ca` rejects it");
        found.push(Finding::warning(Code::CertificateName, format!("{field}.cert"), reason));
    }
    found
}

/// Checks the files of a `policyd.yaml`.
pub(super) fn policyd(config: &PolicydConfig, base: &Path) -> Vec<Finding> {
    let mut found = match &config.source {
        PolicydSource::Files(paths) => sources("source.files", paths, base),
        PolicydSource::Etcd(_) => Vec::new(),
        PolicydSource::Kubernetes(KubernetesSource { kubeconfig, .. }) => kubeconfig
            .iter()
            .filter_map(|path| unreadable("source.kubernetes.kubeconfig".to_owned(), path, base))
            .collect(),
    };
    let secret = config.node_agents.iter().find_map(|agents| agents.tunnel_secret.as_deref());
    found.extend(secret.and_then(|path| unreadable("node_agents.tunnel_secret".to_owned(), path, base)));
    if let Some(tls) = &config.tls {
        found.extend(tls_files("tls", Side::Server, tls.ca.as_deref(), Some((&tls.cert, &tls.key)), base));
    }
    found
}

/// Checks the manifest paths.
fn sources(field: &str, paths: &[PathBuf], base: &Path) -> Vec<Finding> {
    paths.iter().enumerate().filter_map(|(i, path)| unreadable(format!("{field}[{i}]"), path, base)).collect()
}

/// Checks that a path exists.
fn unreadable(field: String, path: &Path, base: &Path) -> Option<Finding> {
    let error = base.join(path).metadata().err()?;
    let reason = format!("{}: can't be read: {error}", path.display());
    Some(Finding { field, severity: Severity::Error, reason, code: Code::Unreadable })
}

/// Checks TLS files: each of them, then certificate and key together.
fn tls_files(field: &str, side: Side, ca: Option<&Path>, own: Option<(&Path, &Path)>, base: &Path) -> Vec<Finding> {
    let resolve = |path: &Path| base.join(path);
    let (ca, own) = (ca.map(resolve), own.map(|(cert, key)| (resolve(cert), resolve(key))));
    let subfield = |name: &str| format!("{field}.{name}");
    let mut found = Vec::new();
    let mut check_validity = |name: &str, validity: Result<Vec<Validity>, TlsError>| match validity {
        Ok(all) => {
            let warnings = all.iter().filter_map(Validity::error);
            found.extend(warnings.map(|reason| Finding::warning(Code::CertificateValidity, subfield(name), reason)));
        }
        Err(error) => found.push(Finding::error(subfield(name), &error)),
    };
    if let Some(ca) = &ca {
        check_validity("ca", tls::check_authorities(ca));
    }
    if let Some((cert, key)) = &own {
        check_validity("cert", tls::check_certificates(cert));
        found.extend(tls::check_key(key).err().map(|error| Finding::error(subfield("key"), &error)));
    }
    let is_readable = found.iter().all(|it| it.severity == Severity::Warning);
    if is_readable && (ca.is_some() || own.is_some()) {
        let own = own.as_ref().map(|(cert, key)| (cert.as_path(), key.as_path()));
        found.extend(side.check(ca.as_deref(), own).err().map(|error| Finding::error(subfield("cert"), &error)));
    }
    found
}
