//! Round trips of views and heartbeats as messages, and rejected messages.

use super::*;

fn member(name: &str) -> Member {
    let secret = Secret::from_slice(&[5; 32]).unwrap();
    Member {
        serving: true,
        incarnation: secret.incarnation(),
        commitment: Some(secret.commitment()),
        fingerprint: Some([3; 32]),
        peer: Some("[2001:db8::1]:4790".parse().unwrap()),
        tunnel_key: Some([4; 32]),
        overlay: Some("192.0.2.11:8472".parse().unwrap()),
        unable: Some("interface gw-out is gone".into()),
        ..Member::new(name.into(), 4)
    }
}

/// A heartbeat of `a` with only the required fields.
fn minimal() -> proto::Heartbeat {
    let secret = Secret::new([5; 32]);
    proto::Heartbeat {
        gateway: "a".into(),
        incarnation: secret.incarnation(),
        secret: secret.bytes().to_owned(),
        tunnel_key: vec![2; 32],
        ..proto::Heartbeat::default()
    }
}

#[test]
fn a_view_survives_encoding_and_decoding() {
    let view = MembershipView { number: 5, serving_changes: 3, members: vec![member("a"), Member::new("b".into(), 5)] };
    let mut message = proto::View::from(&view);
    message.members.reverse();
    assert_eq!(MembershipView::try_from(message), Ok(view.clone()), "members are in order again");
    assert_eq!(view.member("b").map(|it| it.epoch), Some(5));
    assert_eq!(view.member("c"), None);
    assert_eq!(view.active_members().count(), 1);
}

#[test]
fn a_heartbeat_survives_encoding_and_decoding() {
    let (secret, predecessor) = ([3; 32], [4; 32]);
    let parsed = |bytes: [u8; 32]| Secret::from_slice(&bytes).unwrap();
    let heartbeat = Heartbeat {
        gateway: "a".into(),
        incarnation: parsed(secret).incarnation(),
        commitment: parsed(secret).commitment(),
        predecessor: Some(Box::new(parsed(predecessor).commitment())),
        desired_state: DesiredState::Draining,
        seen_view: 9,
        fingerprint: Some([1; 32]),
        peer: Some("192.0.2.1:4790".parse().unwrap()),
        tunnel_key: Some([2; 32]),
        overlay: Some("[2001:db8::2]:8472".parse().unwrap()),
        unable: Some("interface gw-out has no carrier".into()),
        policy_version: Some("fc8ec02219bf7451".into()),
        sessions: 48_211,
        known_view: 10,
    };
    let public = proto::Heartbeat::of(&heartbeat, 3);
    assert!(public.secret.is_empty() && public.predecessor.is_empty(), "a heartbeat has no secrets");
    let sent = proto::Heartbeat { secret: secret.into(), predecessor: predecessor.into(), ..public.clone() };
    assert_eq!(Heartbeat::try_from(sent.clone()), Ok(heartbeat.clone()));
    assert_eq!(Heartbeat::try_from(public), Err(InvalidMessage::Secret("a".into())));
    for secret in [vec![4; 32], vec![3; 31], heartbeat.commitment.into()] {
        let invalid = proto::Heartbeat { secret, ..sent.clone() };
        assert_eq!(Heartbeat::try_from(invalid), Err(InvalidMessage::Secret("a".into())));
    }
    let without_key = proto::Heartbeat { tunnel_key: Vec::new(), ..sent.clone() };
    assert_eq!(Heartbeat::try_from(without_key), Err(InvalidMessage::TunnelKey("a".into(), 0)));
    let last = proto::Heartbeat { known_view: MAX_NUMBER / 2, ..sent };
    assert_eq!(Heartbeat::try_from(last), Err(InvalidMessage::Number(MAX_NUMBER / 2)), "view numbers would run out");
}

#[test]
fn a_fault_is_one_line_of_limited_length() {
    let message = |unable: String| proto::Heartbeat { unable, ..minimal() };
    let parse = |text: &str| Heartbeat::try_from(message(text.to_owned())).unwrap().unable;
    assert_eq!(parse(""), None);
    assert_eq!(parse("a\nb").as_deref(), Some("a b"));
    assert_eq!(parse(&"\u{e4}".repeat(300)).map(|it| it.len()), Some(MAX_FAULT_BYTES));
}

#[test]
fn invalid_messages_are_rejected() {
    let valid = MembershipView { number: 5, serving_changes: 5, members: vec![member("a")] };
    let of = |change: &dyn Fn(&mut proto::View)| {
        let mut message = proto::View::from(&valid);
        change(&mut message);
        MembershipView::try_from(message).unwrap_err()
    };
    assert_eq!(of(&|view| view.members[0].name = "a b".into()), InvalidMessage::Name("a b".into()));
    assert_eq!(of(&|view| view.members[0].fingerprint = vec![0; 31]), InvalidMessage::Fingerprint("a".into(), 31));
    assert_eq!(of(&|view| view.members[0].tunnel_key = vec![0; 33]), InvalidMessage::TunnelKey("a".into(), 33));
    assert_eq!(of(&|view| view.members[0].incarnation += 1), InvalidMessage::Secret("a".into()));
    assert_eq!(
        of(&|view| view.members[0].port = 65536),
        InvalidMessage::Address("a".into(), "2001:db8::1".into(), 65536)
    );
    assert_eq!(
        of(&|view| view.members[0].overlay_port = 0),
        InvalidMessage::Address("a".into(), "192.0.2.11".into(), 0)
    );
    assert_eq!(
        of(&|view| view.members[0].overlay_address = "node-1".into()),
        InvalidMessage::Address("a".into(), "node-1".into(), 8472)
    );
    assert_eq!(of(&|view| view.members[0].epoch = 6), InvalidMessage::Number(5));
    assert_eq!(of(&|view| view.serving_changes = 6), InvalidMessage::Number(5));
    assert_eq!(of(&|view| view.number = u64::MAX), InvalidMessage::Number(u64::MAX));
    assert_eq!(of(&|view| view.members.push(view.members[0].clone())), InvalidMessage::DuplicateMember(5, "a".into()));
    let many = vec![proto::Member::default(); MAX_MEMBERS + 1];
    assert_eq!(of(&|view| view.members.clone_from(&many)), InvalidMessage::TooManyMembers(5, MAX_MEMBERS + 1));
    let heartbeat = minimal();
    assert!(Heartbeat::try_from(heartbeat.clone()).is_ok());
    assert_eq!(
        Heartbeat::try_from(proto::Heartbeat { incarnation: 0, ..heartbeat.clone() }),
        Err(InvalidMessage::Incarnation("a".into()))
    );
    let overlay = proto::Heartbeat { overlay_address: "192.0.2.11".into(), overlay_port: 65536, ..heartbeat.clone() };
    assert_eq!(Heartbeat::try_from(overlay), Err(InvalidMessage::Address("a".into(), "192.0.2.11".into(), 65536)));
    assert_eq!(
        Heartbeat::try_from(proto::Heartbeat { desired_state: 9, ..heartbeat }),
        Err(InvalidMessage::DesiredState("a".into(), 9))
    );
}
