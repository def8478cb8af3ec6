//! Invalid certificate and key files.

use std::fs;

use super::*;

/// The errors of a server and of a client with this identity.
fn errors(ca: &Path, identity: &Identity) -> [String; 2] {
    let server = server_config(Some(ca), ClientCertificates::Required, &identity.cert, &identity.key).unwrap_err();
    let client = client_config(Some(ca), Some(identity.paths())).unwrap_err();
    [server.to_string(), client.to_string()]
}

#[test]
fn an_error_names_the_certificate_or_key_file() {
    let authority = Authority::new("ca");
    let (ca, valid) = (authority.ca(), authority.issue(&["a"]));
    let other = authority.issue(&["b"]);
    let text = fs::read_to_string(&valid.cert).unwrap();
    let file = |name: &str, text: &str| authority.file(name, text);
    let missing = authority.ca().with_file_name("missing");
    let broken = text.replacen("MII", "!!!", 1);
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let with_cert = |cert: PathBuf| (cert.clone(), Identity { cert, ..valid.clone() });
    let with_key = |key: PathBuf| (key.clone(), Identity { key, ..valid.clone() });
    let cases = [
        (with_cert(missing.clone()), "can't be read: No such file"),
        (with_cert(file("empty.pem", "")), "holds no certificate (PEM)"),
        (with_cert(file("garbage.pem", "\u{7f}ELF\0\0")), "holds no certificate (PEM)"),
        (with_cert(valid.key.clone()), "holds no certificate (PEM)"),
        (with_cert(file("broken.pem", &broken)), "holds an invalid certificate (PEM): "),
        (with_cert(file("cut.pem", &text[..text.len() / 2])), "holds an invalid certificate (PEM): "),
        (with_cert(file("nonsense.pem", nonsense)), "can't be used: invalid peer certificate: BadEncoding"),
        (with_key(missing), "can't be read: No such file"),
        (with_key(file("empty.key", "")), "holds no private key (PEM): no items found"),
        (with_key(file("garbage.key", "\u{7f}ELF\0\0")), "holds no private key (PEM): no items found"),
        (with_key(valid.cert.clone()), "holds no private key (PEM): no items found"),
        // The error names the certificate file.
        ((valid.cert.clone(), Identity { key: other.key, ..valid.clone() }), "keys may not be consistent: KeyMismatch"),
    ];
    for ((path, identity), expected) in cases {
        for message in errors(&ca, &identity) {
            assert!(message.starts_with(&format!("{}: ", path.display())), "{message}");
            assert!(message.contains(expected), "{message} / {expected}");
        }
    }
}

#[test]
fn an_error_names_the_ca_file() {
    let authority = Authority::new("ca");
    let own = authority.issue(&["a"]);
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let cases = [
        (authority.ca().with_file_name("missing"), "can't be read: No such file"),
        (authority.file("empty.pem", ""), "holds no certificate (PEM)"),
        (authority.file("garbage.pem", "hello"), "holds no certificate (PEM)"),
        (authority.file("nonsense.pem", nonsense), "can't be used: invalid peer certificate: BadEncoding"),
    ];
    for (ca, expected) in cases {
        for message in [
            server_config(Some(&ca), ClientCertificates::Required, &own.cert, &own.key).unwrap_err().to_string(),
            client_config(Some(&ca), None).unwrap_err().to_string(),
        ] {
            assert!(message.starts_with(&format!("{}: ", ca.display())), "{message}");
            assert!(message.contains(expected), "{message} / {expected}");
        }
    }
}

#[test]
fn without_a_ca_a_client_trusts_the_system_roots() {
    match client_config(None, None) {
        Ok(config) => assert_eq!(config.alpn_protocols, [b"h2"]),
        Err(error) => assert!(error.to_string().contains("configure `ca`"), "{error}"),
    }
}
