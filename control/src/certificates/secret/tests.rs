use std::collections::BTreeSet;
use std::time::Duration;

use super::super::fixtures::{DAY, names, now};
use super::*;

fn owner(uid: &str) -> OwnerReference {
    let text = ["v1", "ConfigMap", "vipgate-certificates", uid].map(str::to_owned);
    let [api_version, kind, name, uid] = text;
    OwnerReference { api_version, kind, name, uid, ..OwnerReference::default() }
}

fn slot<'a>(name: &'a str, present: Option<&'a Secret>) -> Slot<'a> {
    Slot { name, present, owner: None }
}

fn requirements(authority: &Authority, now: SystemTime) -> Requirements<'_> {
    Requirements { authority, now, validity: 90 * DAY, renew_before: 30 * DAY }
}

/// The CA and its Secret.
fn made_ca() -> (Authority, Secret) {
    let (authority, revision) = plan_ca(slot("ca", None), now()).unwrap();
    (authority, revision.secret)
}

fn gateway_secret(authority: &Authority, present: Option<&Secret>, gateway: &str) -> Revision {
    let name = gateway.parse().unwrap();
    plan(slot("gateway", present), Subjects::Gateway(&name), requirements(authority, now())).unwrap()
}

fn keys(secret: &Secret) -> Vec<&str> {
    secret.data.iter().flatten().map(|(key, _)| key.as_str()).collect()
}

/// The keys whose values differ.
fn changed(before: &Secret, after: &Secret) -> Vec<String> {
    let (before, after) = (before.data.clone().unwrap(), after.data.clone().unwrap());
    let all: BTreeSet<_> = before.keys().chain(after.keys()).collect();
    all.into_iter().filter(|key| before.get(*key) != after.get(*key)).cloned().collect()
}

#[test]
fn a_ca_is_made_once_and_kept() {
    let (authority, secret) = made_ca();
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
    assert_eq!(keys(&secret), ["tls.crt", "tls.key"]);
    let (again, revision) = plan_ca(slot("ca", Some(&secret)), now() + 3200 * DAY).unwrap();
    assert!(!revision.is_changed && revision.changes.is_empty());
    assert_eq!(revision.secret, secret);
    assert!(again.pem == authority.pem);
    assert_eq!(revision.kept, ["kept CA ca until 2036-11-26"]);
}

#[test]
fn a_ca_in_its_last_tenth_is_renewed_and_what_it_signed_stays_valid() {
    let (authority, secret) = made_ca();
    let signed = gateway_secret(&authority, None, "node-1").secret;
    for late in [3290 * DAY, 3652 * DAY, 5000 * DAY] {
        let later = now() + late;
        let (renewed, revision) = plan_ca(slot("ca", Some(&secret)), later).unwrap();
        assert!(revision.is_changed);
        assert_eq!(changed(&secret, &revision.secret), ["tls.crt"], "the same key");
        assert!(revision.changes[0].starts_with("renewed certificate of CA ca until 20"), "{:?}", revision.changes);
        assert_eq!(renewed.validity.until, later + super::super::authority::VALIDITY);
        assert!(!renewed.is_due(later));
        // What was signed before: only the CA's certificate beside it is another one.
        let kept = gateway_secret(&renewed, Some(&signed), "node-1");
        assert_eq!(changed(&signed, &kept.secret), ["ca.crt"]);
        assert_eq!(kept.changes, ["changed certificate of the CA in Secret gateway"]);
        // What is signed now has the same issuer: also those who still have the former certificate accept it.
        let new = gateway_secret(&renewed, None, "node-1").secret;
        assert_eq!(changed(&new, &gateway_secret(&authority, Some(&new), "node-1").secret), ["ca.crt"]);
    }
}

#[test]
fn a_broken_ca_is_an_error_that_says_what_to_do() {
    let (authority, secret) = made_ca();
    let (_, other) = made_ca();
    let node = names(&["node-1"]);
    let leaf = authority.sign(&[&node[0]], now(), DAY).unwrap();
    let value = |secret: &Secret, key: &str| secret.data.as_ref().unwrap()[key].0.clone();
    let (crt, key) = (value(&secret, "tls.crt"), value(&secret, "tls.key"));
    for (crt, key, problem) in [
        (None, Some(key.clone()), BrokenAuthority::NoCertificate),
        (Some(crt.clone()), None, BrokenAuthority::NoKey),
        (Some(b"x".to_vec()), Some(key.clone()), BrokenAuthority::Certificate),
        (Some(crt.clone()), Some(b"x".to_vec()), BrokenAuthority::Key),
        (Some(crt), Some(value(&other, "tls.key")), BrokenAuthority::OtherKey),
        (Some(leaf.certificate), Some(leaf.key), BrokenAuthority::NotCa),
    ] {
        let mut broken = secret.clone();
        let values = [("tls.crt", crt), ("tls.key", key)];
        broken.data =
            Some(values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), ByteString(value?)))).collect());
        let error = plan_ca(slot("ca", Some(&broken)), now()).err().unwrap();
        assert!(error.to_string().contains("delete it to replace the CA and all certificates"), "{error}");
        let CertificatesError::BrokenAuthority { problem: found, .. } = error else { panic!("{error}") };
        assert_eq!(found, problem);
    }
}

#[test]
fn a_gateways_secret_has_its_certificate_alone() {
    let (authority, _) = made_ca();
    let first = gateway_secret(&authority, None, "node-1");
    assert_eq!(first.secret.type_.as_deref(), Some("kubernetes.io/tls"));
    assert_eq!(keys(&first.secret), ["ca.crt", "tls.crt", "tls.key"]);
    assert_eq!(first.changes, ["made certificate of node-1 until 2027-02-25: there was none"]);

    let again = gateway_secret(&authority, Some(&first.secret), "node-1");
    assert!(!again.is_changed);
    assert_eq!(again.kept, ["kept certificate of node-1 until 2027-02-25"]);

    // What else is in it isn't ours.
    let mut more = first.secret.clone();
    more.data.as_mut().unwrap().insert("notes".to_owned(), ByteString(b"x".to_vec()));
    assert!(!gateway_secret(&authority, Some(&more), "node-1").is_changed);

    // Another gateway's is made anew.
    let other = gateway_secret(&authority, Some(&first.secret), "node-2");
    assert_eq!(changed(&first.secret, &other.secret), ["tls.crt", "tls.key"]);
}

/// Whatever is broken in a Secret: what has a defect is made anew, and nothing else changes.
#[test]
fn what_is_broken_is_made_anew_and_everything_else_is_kept() {
    let (authority, _) = made_ca();
    let (foreign, _) = made_ca();
    let good = gateway_secret(&authority, None, "node-2").secret;
    let others = gateway_secret(&authority, None, "node-1").secret;
    let from_other_ca = gateway_secret(&foreign, None, "node-2").secret;
    let value = |secret: &Secret, key: &str| secret.data.as_ref().unwrap()[key].clone();
    // Each of the values that may stand for the certificate or the key.
    let choices = |key: &str| {
        [
            None,
            Some(ByteString(Vec::new())),
            Some(ByteString(b"-----BEGIN CERTIFICATE-----\n".to_vec())),
            Some(value(&others, key)),
            Some(value(&from_other_ca, key)),
            Some(value(&good, key)),
        ]
    };
    for crt in choices("tls.crt") {
        for key in choices("tls.key") {
            let is_good = crt == Some(value(&good, "tls.crt")) && key == Some(value(&good, "tls.key"));
            let mut broken = good.clone();
            for (name, value) in [("tls.crt", crt.clone()), ("tls.key", key.clone())] {
                let data = broken.data.as_mut().unwrap();
                data.remove(name);
                data.extend(value.map(|value| (name.to_owned(), value)));
            }
            let repaired = gateway_secret(&authority, Some(&broken), "node-2");
            let expected: &[&str] = if is_good { &[] } else { &["tls.crt", "tls.key"] };
            assert_eq!(changed(&good, &repaired.secret), expected);
            assert_eq!(repaired.is_changed, !is_good);
            assert!(!gateway_secret(&authority, Some(&repaired.secret), "node-2").is_changed);
        }
    }
}

#[test]
fn the_server_has_one_with_all_of_its_names() {
    let (authority, _) = made_ca();
    let list = names(&["vipgate-policyd.vipgate.svc", "localhost"]);
    let server = |present: Option<&Secret>, names: &[DnsName], now| {
        plan(slot("server", present), Subjects::Server(names), requirements(&authority, now)).unwrap()
    };
    let first = server(None, &list, now());
    assert_eq!(keys(&first.secret), ["ca.crt", "tls.crt", "tls.key"]);
    assert_eq!(first.secret.type_.as_deref(), Some("kubernetes.io/tls"));
    assert!(!server(Some(&first.secret), &list, now() + 60 * DAY).is_changed);
    let others = server(Some(&first.secret), &list[..1], now());
    let line = "made certificate of the policy server until 2027-02-25: the one before had other names";
    assert_eq!(others.changes, [line]);
    let later = server(Some(&first.secret), &list, now() + 60 * DAY + Duration::from_secs(1));
    assert_eq!(changed(&first.secret, &later.secret), ["tls.crt", "tls.key"]);
    assert!(later.changes[0].ends_with("until 2027-04-26: the one before ends on 2027-02-25"), "{:?}", later.changes);
}

#[test]
fn an_owner_of_the_same_name_is_replaced_and_others_stay() {
    let (_, mut secret) = made_ca();
    let other = OwnerReference { kind: "Other".to_owned(), ..owner("1") };
    secret.metadata.owner_references = Some(vec![owner("1"), other.clone()]);
    let with = |secret: &Secret, owner: &OwnerReference| {
        plan_ca(Slot { name: "ca", present: Some(secret), owner: Some(owner) }, now()).unwrap().1
    };
    assert!(!with(&secret, &owner("1")).is_changed);
    let revision = with(&secret, &owner("2"));
    assert_eq!(revision.changes, ["changed owner of Secret ca"]);
    assert_eq!(revision.secret.metadata.owner_references, Some(vec![other, owner("2")]));
    assert_eq!(revision.secret.data, secret.data);
    // A new one.
    let made = plan_ca(Slot { name: "ca", present: None, owner: Some(&owner("3")) }, now()).unwrap().1;
    assert_eq!(made.secret.metadata.owner_references, Some(vec![owner("3")]));
}

#[test]
fn secrets_of_others_are_refused() {
    let (authority, ca) = made_ca();
    let plan_nodes =
        |present: Option<&Secret>| plan(slot("x", present), Subjects::Nodes, requirements(&authority, now()));
    let own = plan_nodes(None).unwrap().secret;
    let refused = |change: &dyn Fn(&mut Secret), message: &str| {
        let mut secret = own.clone();
        change(&mut secret);
        assert_eq!(plan_nodes(Some(&secret)).err().unwrap().to_string(), message);
    };
    let label = |secret: &mut Secret, value: &str| {
        let labels = BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), value.to_owned())]);
        secret.metadata.labels = Some(labels);
    };
    let hint = "delete it so that another one is made";
    refused(&|it| label(it, "Helm"), &format!("Secret x is managed by Helm: {hint}"));
    refused(
        &|it| it.metadata.labels = None,
        &format!("Secret x isn't managed by vipgate (label app.kubernetes.io/managed-by: vipgate): {hint}"),
    );
    refused(
        &|it| it.metadata.annotations = Some(BTreeMap::from([(CERT_MANAGER.to_owned(), "x".to_owned())])),
        &format!("Secret x is managed by cert-manager: {hint}"),
    );
    refused(&|it| it.type_.clone_from(&ca.type_), &format!("Secret x has type kubernetes.io/tls, not Opaque: {hint}"));
    refused(
        &|it| it.metadata.deletion_timestamp = Some(serde_json::from_str("\"2026-11-27T00:00:00Z\"").unwrap()),
        "Secret x is being deleted: run this again when it is gone",
    );
}

#[test]
fn agents_of_nodes_get_the_cas_certificate_alone_and_the_tunnels_secret_is_made_once() {
    let (authority, _) = made_ca();
    let of = |subjects, name, present: Option<&Secret>| {
        plan(slot(name, present), subjects, requirements(&authority, now())).unwrap()
    };
    let nodes = of(Subjects::Nodes, "nodes", None).secret;
    assert_eq!((keys(&nodes), nodes.type_.as_deref()), (vec!["ca.crt"], Some("Opaque")));
    assert!(!of(Subjects::Nodes, "nodes", Some(&nodes)).is_changed);
    let [first, second] = [(); 2].map(|()| of(Subjects::Tunnels, "tunnels", None));
    assert_eq!(first.changes, ["made `secret` of Secret tunnels"]);
    assert_eq!((keys(&first.secret), first.secret.data.as_ref().unwrap()["secret"].0.len()), (vec!["secret"], 64));
    assert_eq!(changed(&first.secret, &second.secret), ["secret"], "it is random");
    let kept = of(Subjects::Tunnels, "tunnels", Some(&first.secret));
    assert!(!kept.is_changed && kept.changes.is_empty());
    assert_eq!(kept.kept, ["kept `secret` of Secret tunnels"]);
}
