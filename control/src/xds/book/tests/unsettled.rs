//! A server that sends no settings.

use super::world::deal;
use super::*;

proptest! {
    /// The version is a name made of what is there: however it came to be there, and after a restart too.
    #[test]
    fn a_version_without_settings_names_what_is_there(deals in prop::collection::vec(deal(), 1..5), seed: u64) {
        let (mut dice, mut book, mut builder) = (Dice(seed), Book::default(), builder());
        let mut past = vec![Told::default()];
        for deal in &deals {
            let (before, server) = (past.last().unwrap(), Told::of(deal).unsettled());
            for response in server.tell(before, &past, &mut dice) {
                book.stage(response).unwrap();
                prop_assert!(!book.is_whole() && !book.expects_settings());
            }
            let change = book.offer(&Viewer::named("g1")).change;
            let snapshot = builder.with_change(&change).unwrap();
            prop_assert_eq!(seen(&snapshot.policy), built(&deal.part_of(Some(&Viewer::named("g1")), &change.version)));
            book.commit();
            prop_assert_eq!(book.version(), &change.version);
            prop_assert_eq!(book.held(), &server.held);

            let mut fresh = Book::default();
            fresh.stage_held(server.held.clone()).unwrap();
            prop_assert_eq!(&fresh.offer(&Viewer::named("g1")).change.version, &change.version);
            past.push(server);
        }
    }
}

#[test]
fn other_content_has_another_version() {
    let version = |kind: Kind, name: &str, version: &str| {
        let body = prost::Message::encode_to_vec(&proto::Gateway { name: name.to_owned(), ..Default::default() });
        let held = Held { version: version.to_owned(), body: body.into() };
        let mut book = Book::default();
        book.held.insert(key(kind, name), held);
        book.offer(&Viewer::named("g1")).change.version
    };
    let mut versions = BTreeSet::new();
    for (kind, name, of) in [
        (Kind::Gateway, "ab", "c"),
        (Kind::Gateway, "a", "bc"),
        (Kind::Gateway, "ab", "d"),
        (Kind::EgressPolicy, "ab", "c"),
    ] {
        versions.insert(version(kind, name, of));
    }
    assert_eq!(versions.len(), 4);
}
