use super::*;
use crate::policyd::object_status::condition::Truth;
use crate::source::SourceUpdate;
use crate::source::store::ManifestStore;

const POOL: &str = "apiVersion: vipgate.io/v1alpha1\nkind: AddressPool\nmetadata: {name: a}\n\
                    spec: {ranges: [203.0.113.0/28]}\n";

fn policy(name: &str, vip: &str) -> String {
    format!(
        "apiVersion: vipgate.io/v1alpha1\nkind: EgressPolicy\nmetadata: {{name: {name}, namespace: t}}\n\
         spec: {{selectors: [{{podSelector: {{matchLabels: {{app: x}}}}}}], addresses: [{vip}]}}\n"
    )
}

/// The outcome once these objects have come, as from the API.
fn compile(store: &mut ManifestStore, objects: &[(&str, String)]) -> CompileOutcome {
    let changed = objects.iter().map(|(name, text)| ((*name).into(), Ok(text.clone().into()))).collect();
    store.update(SourceUpdate { changed, ..SourceUpdate::default() });
    store.compile()
}

#[test]
fn a_conflict_names_the_other_object_and_the_effect() {
    let mut store = ManifestStore::new(true);
    let objects = [
        ("AddressPool/a", POOL.to_owned()),
        ("EgressPolicy/t/p", policy("p", "203.0.113.1")),
        ("EgressPolicy/t/q", policy("q", "203.0.113.1")),
    ];
    let outcome = compile(&mut store, &objects);
    let acceptance = Acceptance::of(&outcome);
    let pool = acceptance.condition("AddressPool/a");
    assert_eq!((pool.status, &*pool.reason, &*pool.message), (Truth::True, "Accepted", "in force as written"));
    let condition = acceptance.condition("EgressPolicy/t/q");
    assert_eq!((condition.status, &*condition.reason), (Truth::False, ADDRESS_CONFLICT), "{}", condition.message);
    for part in ["spec.addresses[0]: ", "EgressPolicy t/p", "[VG0410]; it is not in force"] {
        assert!(condition.message.contains(part), "{}", condition.message);
    }
    assert!(acceptance.fault("EgressPolicy/t/q").is_some() && acceptance.fault("EgressPolicy/t/p").is_none());
    // It selects nothing, which is no fault.
    let other = acceptance.condition("EgressPolicy/t/p");
    assert_eq!((other.status, &*other.reason), (Truth::True, "NoPodSelected"), "{}", other.message);
    assert!(other.message.starts_with("warning: spec.selectors[0]"), "{}", other.message);
}

#[test]
fn what_is_in_force_instead_is_in_the_message() {
    let mut store = ManifestStore::new(true);
    compile(&mut store, &[("AddressPool/a", POOL.to_owned()), ("EgressPolicy/t/p", policy("p", "203.0.113.1"))]);
    let outcome = compile(&mut store, &[("EgressPolicy/t/p", policy("p", "203.0.114.1"))]);
    let condition = Acceptance::of(&outcome).condition("EgressPolicy/t/p");
    assert_eq!((condition.status, &*condition.reason), (Truth::False, "AddressOutsidePools"), "{}", condition.message);
    assert!(condition.message.ends_with("; it is not in force"), "{}", condition.message);
    // What can't be read any more stays.
    compile(&mut store, &[("EgressPolicy/t/p", policy("p", "203.0.113.1"))]);
    let outcome = compile(&mut store, &[("EgressPolicy/t/p", policy("p", "203.0.113.x"))]);
    let condition = Acceptance::of(&outcome).condition("EgressPolicy/t/p");
    assert!(condition.message.ends_with("; it stays in force as it was last read"), "{}", condition.message);
}

#[test]
fn many_diagnostics_are_counted() {
    let texts = (0..8).map(|n| n.to_string());
    assert_eq!(summary(texts), "0; 1; 2; 3; 4; and 3 more");
    assert_eq!(summary(["a".to_owned()].into_iter()), "a");
}
