//! Certificates for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};

pub struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
    /// Path of its certificate.
    pub ca_file: String,
}

/// Paths of a certificate and its key.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub cert: String,
    pub key: String,
}

impl CertificateAuthority {
    /// Creates an authority that writes its files to `folder`.
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = folder.join(format!("{name}.ca"));
        fs::write(&file, issuer.pem()).unwrap();
        Self { issuer, folder: folder.to_owned(), ca_file: file.display().to_string() }
    }

    /// Signs a certificate for these names or addresses, valid from yesterday until `end`, and writes certificate and
    /// key to files named `file`, each atomically.
    pub fn sign(&self, file: &str, names: &[&str], end: SystemTime) -> Certificate {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, file);
        let date_time =
            |time: SystemTime| date_time_ymd(1970, 1, 1) + time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        params.not_before = date_time(SystemTime::now() - Duration::from_hours(24));
        params.not_after = date_time(end);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let write = |ending: &str, text: String| {
            let path = self.folder.join(file).with_extension(ending);
            let draft = self.folder.join("pem-draft");
            fs::write(&draft, text).unwrap();
            fs::rename(draft, &path).unwrap();
            path.display().to_string()
        };
        // The key first: a reader in between finds a pair that doesn't match, and keeps its previous one.
        let key = write("key", key.serialize_pem());
        Certificate { key, cert: write("crt", certificate.pem()) }
    }
}

/// 24 hours from now: later than the end of any test.
pub fn tomorrow() -> SystemTime {
    SystemTime::now() + Duration::from_hours(24)
}
