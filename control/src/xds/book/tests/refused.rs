//! What is refused has never been there.

use super::world::deal;
use super::*;

/// What can be wrong in a response.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    NoBody,
    OtherType,
    Nonsense,
    OtherName,
    UnknownType,
}

const WRONGS: [Wrong; 5] = [Wrong::NoBody, Wrong::OtherType, Wrong::Nonsense, Wrong::OtherName, Wrong::UnknownType];

impl Wrong {
    fn make(self, response: &mut DeltaDiscoveryResponse, at: usize) {
        let Some(resource) = response.resources.get_mut(at) else { panic!("no resource") };
        match (self, &mut resource.resource) {
            (Self::NoBody, body) => *body = None,
            (Self::OtherType, Some(body)) => body.type_url = "type.googleapis.com/google.protobuf.Empty".to_owned(),
            (Self::Nonsense, Some(body)) => body.value.push(7),
            (Self::OtherName, _) => resource.name.push('x'),
            (Self::UnknownType, _) => {
                response.type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned();
            }
            (_, None) => panic!("no body"),
        }
    }

    fn is_said_by(self, refusal: &Refusal) -> bool {
        let text = refusal.to_string();
        match self {
            Self::NoBody => text.starts_with("resource ") && text.ends_with(": has no body"),
            Self::OtherType => text.ends_with(": is a type.googleapis.com/google.protobuf.Empty"),
            Self::Nonsense => text.contains(": is no "),
            Self::OtherName => text.contains("but the resource's name is `"),
            Self::UnknownType => text.starts_with("type_url `") && text.ends_with("` is unknown to this gateway"),
        }
    }
}

proptest! {
    #[test]
    fn a_refusal_leaves_everything_as_it_was(
        (first, second, third) in (deal(), deal(), deal()),
        seed: u64,
        wrong in prop::sample::select(WRONGS.to_vec()),
    ) {
        let mut dice = Dice(seed);
        let servers = [Told::of(&first), Told::of(&second), Told::of(&third)];
        let mut book = book_of(&servers[0]);
        for response in servers[1].tell(&servers[0], &[], &mut dice) {
            book.stage(response).unwrap();
        }
        let (before, offer) = (format!("{book:?}"), book.offer(&Viewer::named("g1")));
        for mut response in servers[2].tell(&servers[1], &servers, &mut dice) {
            let good = response.clone();
            if good.resources.is_empty() {
                continue;
            }
            wrong.make(&mut response, dice.roll(good.resources.len()));
            let refusal = book.stage(response).unwrap_err();
            prop_assert!(wrong.is_said_by(&refusal), "{:?}: {}", wrong, refusal);
            prop_assert_eq!(&format!("{book:?}"), &before);
        }
        let again = book.offer(&Viewer::named("g1"));
        prop_assert_eq!((again.change, again.peers), (offer.change, offer.peers));
        // The update goes on as if nothing had been.
        book.stage(servers[1].settle()).unwrap();
        prop_assert!(book.is_whole());
        prop_assert_eq!(book.commit(), servers[1].differences(&servers[0]));
        prop_assert_eq!(book.held(), &servers[1].held);
    }
}

/// As many gateways as one may hold but `less`, without their servers.
fn nearly_full(less: usize) -> Book {
    let held = Held { version: String::new(), body: Bytes::new() };
    let gateways = (0..MOST_RESOURCES - less).map(|i| (key(Kind::Gateway, &format!("g{i:07}")), held.clone()));
    Book { held: gateways.collect(), ..Book::default() }
}

fn gateways(numbers: std::ops::Range<usize>) -> DeltaDiscoveryResponse {
    let gateway = |i| {
        let name = format!("g{i:07}");
        let body = prost::Message::encode_to_vec(&proto::Gateway { name: name.clone(), ..Default::default() });
        (key(Kind::Gateway, &name), Some(Held { version: "2".to_owned(), body: body.into() }))
    };
    response(Kind::Gateway, &numbers.map(gateway).collect::<Vec<_>>())
}

#[test]
fn more_than_a_gateway_holds_is_refused() {
    let mut book = nearly_full(1000);
    book.stage(gateways(MOST_RESOURCES - 1000..MOST_RESOURCES)).unwrap();
    assert_eq!(book.stage(gateways(MOST_RESOURCES..MOST_RESOURCES + 1)), Err(Refusal::TooMany));
    assert_eq!(Refusal::TooMany.to_string(), "more than 1048576 resources");
}

/// A server that has lost its memory tells everything again: that is no more than there is.
#[test]
fn a_full_gateway_hears_everything_again() {
    let mut book = nearly_full(1000);
    for part in 0..10 {
        book.stage(gateways(part * 700..part * 700 + 700)).unwrap();
    }
    book.discard();
    book.stage(gateways(MOST_RESOURCES - 1000..MOST_RESOURCES)).unwrap();
}

#[test]
fn a_cache_with_nonsense_is_refused() {
    let held = Held { version: "1".to_owned(), body: b"\xff".to_vec().into() };
    let refusal = Book::default().stage_held([(key(Kind::Vip, "203.0.113.1"), held)].into()).unwrap_err();
    assert!(refusal.to_string().starts_with("resource Vip 203.0.113.1: is no Vip: "), "{refusal}");
}

/// A refusal is logged, and sent back.
#[test]
fn a_refusal_is_short_and_printable() {
    let evil = "\n\u{1b}".repeat(1 << 16);
    let mut of_type = response(Kind::Vip, &[]);
    of_type.type_url.clone_from(&evil);
    let body = Held { version: String::new(), body: Bytes::new() };
    let of_name = response(Kind::Vip, &[(key(Kind::Vip, &evil), Some(body))]);
    let mut of_body = of_name.clone();
    of_body.resources[0].resource.as_mut().unwrap().type_url.clone_from(&evil);
    for response in [of_type, of_name, of_body] {
        let said = Book::default().stage(response).unwrap_err().to_string();
        assert!(said.len() < 8192, "{} bytes", said.len());
        assert!(!said.contains(char::is_control), "{said:?}");
    }
}
