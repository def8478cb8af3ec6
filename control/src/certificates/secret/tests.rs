use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use super::super::fixtures::{DAY, names, now};
use super::super::names::DnsName;
use super::*;

fn owner(uid: &str) -> OwnerReference {
    let text = ["v1", "ServiceAccount", "vipgate-certificates", uid].map(str::to_owned);
    let [api_version, kind, name, uid] = text;
    OwnerReference { api_version, kind, name, uid, ..OwnerReference::default() }
}

fn slot<'a>(name: &'a str, present: Option<&'a Secret>) -> Slot<'a> {
    Slot { name, present, owner: None }
}

fn requirements(names: &[DnsName], now: SystemTime) -> Requirements<'_> {
    Requirements { names, now, validity: 90 * DAY, renew_before: 30 * DAY }
}

/// The server's Secret as planned at a time, and its CA bundle.
fn server(present: Option<&Secret>, names: &[DnsName], now: SystemTime) -> (Vec<u8>, Revision) {
    plan_server(slot("server", present), requirements(names, now)).unwrap()
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
fn a_certificate_is_made_once_and_is_its_own_ca_bundle() {
    let list = names(&["vipgate-policyd.vipgate.svc", "localhost"]);
    let (bundle, first) = server(None, &list, now());
    assert_eq!(first.secret.type_.as_deref(), Some("kubernetes.io/tls"));
    assert_eq!(keys(&first.secret), ["ca.crt", "tls.crt", "tls.key"]);
    let data = first.secret.data.as_ref().unwrap();
    assert!(data["ca.crt"] == data["tls.crt"] && data["ca.crt"].0 == bundle);
    let made = "made certificate of the policy server until 2027-02-25: there was none";
    assert_eq!(first.changes, [made, "stored `ca.crt` in Secret server"]);

    let (again, kept) = server(Some(&first.secret), &list, now() + 60 * DAY);
    assert!(!kept.is_changed && again == bundle);
    assert_eq!(kept.kept, ["kept certificate of the policy server until 2027-02-25"]);

    // What else is in it isn't ours.
    let mut more = first.secret.clone();
    more.data.as_mut().unwrap().insert("notes".to_owned(), ByteString(b"x".to_vec()));
    assert!(!server(Some(&more), &list, now()).1.is_changed);
}

#[test]
fn a_certificate_that_ends_soon_or_has_other_names_is_replaced_with_the_same_key() {
    let list = names(&["vipgate-policyd.vipgate.svc", "localhost"]);
    let first = server(None, &list, now()).1.secret;
    let (_, others) = server(Some(&first), &list[..1], now());
    let line = "made certificate of the policy server until 2027-02-25: the one before had other names";
    assert_eq!(others.changes, [line, "stored `ca.crt` in Secret server"]);
    let (bundle, later) = server(Some(&first), &list, now() + 60 * DAY + Duration::from_secs(1));
    assert!(later.changes[0].ends_with("until 2027-04-26: the one before ends on 2027-02-25"), "{:?}", later.changes);
    for revision in [&others, &later] {
        assert_eq!(changed(&first, &revision.secret), ["ca.crt", "tls.crt"]);
    }
    assert_eq!(later.secret.data.as_ref().unwrap()["ca.crt"].0, bundle);
}

#[test]
fn a_lost_or_foreign_bundle_beside_a_good_certificate_is_put_back() {
    let list = names(&["a"]);
    let good = server(None, &list, now()).1.secret;
    for value in [None, Some(ByteString(b"x".to_vec()))] {
        let mut broken = good.clone();
        let data = broken.data.as_mut().unwrap();
        data.remove("ca.crt");
        data.extend(value.map(|value| ("ca.crt".to_owned(), value)));
        let (_, revision) = server(Some(&broken), &list, now());
        assert_eq!(revision.secret, good);
        assert_eq!(revision.changes, ["stored `ca.crt` in Secret server"]);
    }
}

/// Whatever is broken in a Secret: the key is kept if it can be used, and the certificate is then its own.
#[test]
fn what_is_broken_is_made_anew_and_a_usable_key_is_kept() {
    let list = names(&["a"]);
    let good = server(None, &list, now()).1.secret;
    let other = server(None, &list, now()).1.secret;
    let other_names = server(None, &names(&["b"]), now()).1.secret;
    let value = |secret: &Secret, key: &str| secret.data.as_ref().unwrap()[key].clone();
    // Each of the values that may stand for the certificate or the key, and whether it can be used.
    let choices = |key: &str| {
        [
            (None, false),
            (Some(ByteString(Vec::new())), false),
            (Some(ByteString(b"-----BEGIN CERTIFICATE-----\n".to_vec())), false),
            (Some(value(&other, key)), true),
            (Some(value(&other_names, key)), true),
            (Some(value(&good, key)), true),
        ]
    };
    for (crt, _) in choices("tls.crt") {
        for (key, is_usable) in choices("tls.key") {
            let is_pair =
                |secret: &Secret| crt == Some(value(secret, "tls.crt")) && key == Some(value(secret, "tls.key"));
            let is_good = is_pair(&good) || is_pair(&other);
            let mut broken = good.clone();
            for (name, value) in [("tls.crt", crt.clone()), ("tls.key", key.clone())] {
                let data = broken.data.as_mut().unwrap();
                data.remove(name);
                data.extend(value.map(|value| (name.to_owned(), value)));
            }
            let (_, repaired) = server(Some(&broken), &list, now());
            assert_eq!(value(&repaired.secret, "tls.crt") == crt.clone().unwrap_or_default(), is_good);
            assert_eq!(value(&repaired.secret, "tls.key") == key.clone().unwrap_or_default(), is_usable);
            assert!(!server(Some(&repaired.secret), &list, now()).1.is_changed);
        }
    }
}

#[test]
fn an_owner_of_the_same_name_is_replaced_and_others_stay() {
    let other = OwnerReference { kind: "Other".to_owned(), ..owner("1") };
    let with = |present: Option<&Secret>, owner: &OwnerReference| {
        plan_clients(Slot { name: "clients", present, owner: Some(owner) }, b"bundle").unwrap()
    };
    let mut secret = with(None, &owner("1")).secret;
    assert_eq!(secret.metadata.owner_references, Some(vec![owner("1")]));
    secret.metadata.owner_references = Some(vec![owner("1"), other.clone()]);
    assert!(!with(Some(&secret), &owner("1")).is_changed);
    let revision = with(Some(&secret), &owner("2"));
    assert_eq!(revision.changes, ["changed owner of Secret clients"]);
    assert_eq!(revision.secret.metadata.owner_references, Some(vec![other, owner("2")]));
    assert_eq!(revision.secret.data, secret.data);
}

#[test]
fn secrets_of_others_are_refused() {
    let planned = |present: Option<&Secret>| plan_clients(slot("x", present), b"bundle");
    let own = planned(None).unwrap().secret;
    let refused = |change: &dyn Fn(&mut Secret), message: &str| {
        let mut secret = own.clone();
        change(&mut secret);
        assert_eq!(planned(Some(&secret)).err().unwrap().to_string(), message);
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
    refused(
        &|it| it.type_ = Some("kubernetes.io/tls".to_owned()),
        &format!("Secret x has type kubernetes.io/tls, not Opaque: {hint}"),
    );
    refused(
        &|it| it.metadata.deletion_timestamp = Some(serde_json::from_str("\"2026-11-27T00:00:00Z\"").unwrap()),
        "Secret x is being deleted: run this again when it is gone",
    );
}

#[test]
fn clients_get_the_bundle_alone_and_the_tunnels_secret_is_made_once() {
    let clients = |present: Option<&Secret>, bundle: &[u8]| plan_clients(slot("clients", present), bundle).unwrap();
    let first = clients(None, b"bundle");
    assert_eq!((keys(&first.secret), first.secret.type_.as_deref()), (vec!["ca.crt"], Some("Opaque")));
    assert!(!clients(Some(&first.secret), b"bundle").is_changed);
    let second = clients(Some(&first.secret), b"another");
    assert!(second.is_changed && second.changes == ["stored `ca.crt` in Secret clients"]);
    let tunnels = |present: Option<&Secret>| plan_tunnels(slot("tunnels", present)).unwrap();
    let [first, second] = [(); 2].map(|()| tunnels(None));
    assert_eq!(first.changes, ["made `secret` of Secret tunnels"]);
    assert_eq!((keys(&first.secret), first.secret.data.as_ref().unwrap()["secret"].0.len()), (vec!["secret"], 64));
    assert_eq!(changed(&first.secret, &second.secret), ["secret"], "it is random");
    let kept = tunnels(Some(&first.secret));
    assert!(!kept.is_changed && kept.changes.is_empty());
    assert_eq!(kept.kept, ["kept `secret` of Secret tunnels"]);
}
