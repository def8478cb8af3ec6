//! The validity of certificates in metrics.

use super::*;

/// Seconds since 1970 of 2019-01-01 and 2020-01-01, between which an expired certificate was valid.
const EXPIRED: (u64, u64) = (1_546_300_800, 1_577_836_800);

/// Start and end of each named certificate.
fn periods(files: &CertificateFiles) -> Vec<(String, u64, u64)> {
    let [from, until] = CertificateValidity::read(files).families();
    let names = |family: &crate::metric::Family| -> Vec<String> {
        family.values.iter().map(|(labels, _)| labels[0].1.clone()).collect()
    };
    assert_eq!(names(&from), names(&until));
    let pairs = from.values.into_iter().zip(until.values);
    pairs.map(|((mut labels, from), (_, until))| (labels.remove(0).1, from, until)).collect()
}

#[test]
fn a_chain_ends_with_its_first_certificate_and_a_file_of_cas_with_its_last() {
    let ca = Authority::new("ca");
    let (valid, expired) = (ca.issue(&["gw-1"]), ca.issue_expired(&["gw-2"]));
    let both = [&valid.cert, &expired.cert].map(|path| std::fs::read_to_string(path).unwrap()).concat();
    let both = ca.file("both.pem", &both);
    let files = |own: &Path, ca: &Path| CertificateFiles { own: Some(own.to_owned()), ca: Some(ca.to_owned()) };
    let own = ("own".to_owned(), EXPIRED.0, EXPIRED.1);
    let found = periods(&files(&both, &both));
    assert_eq!(found[0], own);
    assert_eq!(found[1].0, "ca");
    assert!(found[1].2 > EXPIRED.1, "{found:?}");
    // The same for a file with one certificate.
    assert_eq!(periods(&files(&expired.cert, &expired.cert))[1].2, EXPIRED.1);
}

#[test]
fn what_is_missing_or_invalid_has_no_validity() {
    let ca = Authority::new("ca");
    let identity = ca.issue(&["gw-1"]);
    assert_eq!(periods(&CertificateFiles::default()), []);
    let no_certificate = CertificateFiles { own: Some(identity.key.clone()), ca: Some(ca.ca()) };
    assert_eq!(periods(&no_certificate).iter().map(|(name, ..)| &**name).collect::<Vec<_>>(), ["ca"]);
    let missing = CertificateFiles { own: Some(identity.cert), ca: Some("/nonexistent/ca.pem".into()) };
    assert_eq!(periods(&missing).iter().map(|(name, ..)| &**name).collect::<Vec<_>>(), ["own"]);
}
