//! Certificates of a test.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};

/// Who signs certificates.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: PathBuf,
    /// Its own certificate.
    pub file: String,
}

/// Files of a certificate and its key.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate.
    pub cert: String,
    /// The key.
    pub key: String,
}

impl Authority {
    /// One whose files are in `folder`.
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let file = folder.join(format!("{name}.ca"));
        fs::write(&file, issuer.pem()).unwrap();
        Self { issuer, folder: folder.to_owned(), file: file.display().to_string() }
    }

    /// Signs a certificate for these names or addresses, good from yesterday until `end`, and writes it to files called
    /// `file`, each in one step.
    pub fn sign(&self, file: &str, names: &[&str], end: SystemTime) -> Certificate {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, file);
        let moment =
            |time: SystemTime| date_time_ymd(1970, 1, 1) + time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        params.not_before = moment(SystemTime::now() - Duration::from_hours(24));
        params.not_after = moment(end);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let write = |ending: &str, text: String| {
            let path = self.folder.join(file).with_extension(ending);
            let draft = self.folder.join("pem-draft");
            fs::write(&draft, text).unwrap();
            fs::rename(draft, &path).unwrap();
            path.display().to_string()
        };
        // The key first: whoever looks in between finds a pair that doesn't fit, and keeps what it has.
        let key = write("key", key.serialize_pem());
        Certificate { key, cert: write("crt", certificate.pem()) }
    }
}

/// A time that doesn't come while a test runs.
pub fn tomorrow() -> SystemTime {
    SystemTime::now() + Duration::from_hours(24)
}
