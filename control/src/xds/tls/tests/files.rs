//! Files that hold no certificates.

use std::fs;

use super::*;

/// What a server says that is to show this, and a client.
fn shown(ca: &Path, own: &Identity) -> [String; 2] {
    let server = server(Some(ca), &own.cert, &own.key).unwrap_err();
    let client = client(Some(ca), Some(own.paths())).unwrap_err();
    [server.to_string(), client.to_string()]
}

#[test]
fn a_certificate_that_cannot_be_shown_is_named() {
    let authority = Authority::new("ca");
    let (ca, good) = (authority.ca(), authority.issue(&["a"]));
    let other = authority.issue(&["b"]);
    let text = fs::read_to_string(&good.cert).unwrap();
    let file = |name: &str, text: &str| authority.file(name, text);
    let missing = authority.ca().with_file_name("missing");
    let broken = text.replacen("MII", "!!!", 1);
    let nonsense = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let with_cert = |cert: PathBuf| (cert.clone(), Identity { cert, ..good.clone() });
    let with_key = |key: PathBuf| (key.clone(), Identity { key, ..good.clone() });
    let cases = [
        (with_cert(missing.clone()), "can't be read: No such file"),
        (with_cert(file("empty.pem", "")), "holds no certificate (PEM)"),
        (with_cert(file("garbage.pem", "\u{7f}ELF\0\0")), "holds no certificate (PEM)"),
        (with_cert(good.key.clone()), "holds no certificate (PEM)"),
        (with_cert(file("broken.pem", &broken)), "is no list of certificates (PEM): "),
        (with_cert(file("cut.pem", &text[..text.len() / 2])), "is no list of certificates (PEM): "),
        (with_cert(file("nonsense.pem", nonsense)), "can't be used: invalid peer certificate: BadEncoding"),
        (with_key(missing), "can't be read: No such file"),
        (with_key(file("empty.key", "")), "holds no private key (PEM): no items found"),
        (with_key(file("garbage.key", "\u{7f}ELF\0\0")), "holds no private key (PEM): no items found"),
        (with_key(good.cert.clone()), "holds no private key (PEM): no items found"),
        // The certificate is named: it is the one that clients see.
        ((good.cert.clone(), Identity { key: other.key, ..good.clone() }), "keys may not be consistent: KeyMismatch"),
    ];
    for ((path, identity), expected) in cases {
        for said in shown(&ca, &identity) {
            assert!(said.starts_with(&format!("{}: ", path.display())), "{said}");
            assert!(said.contains(expected), "{said} / {expected}");
        }
    }
}

#[test]
fn an_authority_that_cannot_be_trusted_is_named() {
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
        for said in [
            server(Some(&ca), &own.cert, &own.key).unwrap_err().to_string(),
            client(Some(&ca), None).unwrap_err().to_string(),
        ] {
            assert!(said.starts_with(&format!("{}: ", ca.display())), "{said}");
            assert!(said.contains(expected), "{said} / {expected}");
        }
    }
}

#[test]
fn without_an_authority_those_of_the_machine_count() {
    match client(None, None) {
        Ok(config) => assert_eq!(config.alpn_protocols, [b"h2"]),
        Err(error) => assert!(error.to_string().contains("name those to trust by `ca`"), "{error}"),
    }
}
