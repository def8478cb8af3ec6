use super::super::manifest::hash;
use super::*;

const POLICIES: Collection = Collection { kind: Kind::EgressPolicy, namespace: None };
const NAME: &str = "EgressPolicy/t/p";

fn manifest(name: &str, text: &str, (uid, generation, status): (&str, i64, Option<&str>)) -> Manifest {
    let observation = Observation { uid: uid.into(), generation, status: status.map(Into::into) };
    let document = text.into();
    let hash = hash(&document);
    Manifest { name: name.into(), document, hash, selects_pods: false, observation: Some(observation) }
}

fn object(objects: &ObservedObjects, name: &str) -> ObservedObject {
    objects.snapshot().get(name).cloned().unwrap()
}

#[test]
fn a_status_that_changes_alone_keeps_the_revision_of_the_generation() {
    let objects = ObservedObjects::default();
    objects.apply(&POLICIES, &CollectionEvent::Listed(vec![manifest(NAME, "1", ("u", 1, None))], None), 1);
    objects.apply(&POLICIES, &CollectionEvent::Applied(manifest(NAME, "1", ("u", 1, Some("{}")))), 2);
    let with_status = object(&objects, NAME);
    assert_eq!((with_status.revision, with_status.status.as_deref()), (1, Some(&"{}".into())));
    // The same status again is the same allocation, so that readers compare pointers.
    objects.apply(&POLICIES, &CollectionEvent::Applied(manifest(NAME, "2", ("u", 2, Some("{}")))), 2);
    let changed = object(&objects, NAME);
    assert_eq!((changed.revision, changed.generation), (2, 2));
    assert!(Arc::ptr_eq(changed.status.as_ref().unwrap(), with_status.status.as_ref().unwrap()));
    // Changed and changed back before a list: the manifest is in no further update.
    objects.apply(&POLICIES, &CollectionEvent::Listed(vec![manifest(NAME, "2", ("u", 4, None))], None), 7);
    let listed = object(&objects, NAME);
    assert_eq!((listed.revision, listed.generation, listed.status), (2, 4, None));
}

#[test]
fn an_object_created_again_is_another_one_of_a_later_update() {
    let objects = ObservedObjects::default();
    objects.apply(&POLICIES, &CollectionEvent::Applied(manifest(NAME, "1", ("u", 5, Some("{}")))), 1);
    objects.apply(&POLICIES, &CollectionEvent::Deleted(NAME.into()), 2);
    assert!(objects.snapshot().is_empty());
    objects.apply(&POLICIES, &CollectionEvent::Applied(manifest(NAME, "1", ("v", 1, None))), 2);
    let created = object(&objects, NAME);
    assert_eq!((&*created.uid, created.generation, created.revision, created.status), ("v", 1, 2, None));
}

#[test]
fn a_list_replaces_the_objects_of_its_collection_alone() {
    let objects = ObservedObjects::default();
    let in_namespace = |name: &str| Collection { kind: Kind::EgressPolicy, namespace: Some(name.into()) };
    let one = |name| manifest(name, "1", ("u", 1, None));
    for (namespace, name) in [("t", "EgressPolicy/t/p"), ("t-2", "EgressPolicy/t-2/p"), ("t0", "EgressPolicy/t0/p")] {
        objects.apply(&in_namespace(namespace), &CollectionEvent::Listed(vec![one(name)], None), 1);
    }
    let pools = Collection { kind: Kind::AddressPool, namespace: None };
    objects.apply(&pools, &CollectionEvent::Listed(vec![one("AddressPool/a")], None), 1);
    objects.apply(&in_namespace("t"), &CollectionEvent::Listed(vec![one("EgressPolicy/t/q")], None), 2);
    let names = |objects: &ObservedObjects| objects.snapshot().keys().map(ToString::to_string).collect::<Vec<_>>();
    let expected = ["AddressPool/a", "EgressPolicy/t-2/p", "EgressPolicy/t/q", "EgressPolicy/t0/p"];
    assert_eq!(names(&objects), expected);
    // The definition is removed, and with it all objects.
    let missing = CollectionEvent::Unavailable { is_missing: true, reason: "no such kind".to_owned() };
    objects.apply(&POLICIES, &missing, 3);
    assert_eq!(names(&objects), ["AddressPool/a"]);
    let forbidden = CollectionEvent::Unavailable { is_missing: false, reason: "forbidden".to_owned() };
    objects.apply(&pools, &forbidden, 3);
    assert_eq!(names(&objects), ["AddressPool/a"], "its objects are still there");
}
