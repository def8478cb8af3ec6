use kube::core::Status;
use vipgate_policy::manifest::Kind;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn write(purpose: Purpose, manifest: &str, uid: &str) -> Write {
    Write::status(purpose, ObjectReference::of_manifest(Kind::EgressPolicy, manifest, &uid.into()), None, None)
}

#[test]
fn errors_say_whether_another_plan_or_a_person_must_resolve_them() {
    let of = |code| {
        let status = Status { code, message: "why".to_owned(), ..Status::default() };
        WriteError::of(&RequestError::Failed(Box::new(kube::Error::Api(status.boxed()))))
    };
    for code in [404, 409] {
        assert_eq!(of(code), WriteError::Conflict);
    }
    for code in [401, 403] {
        assert_eq!(of(code), WriteError::Denied("why".to_owned()));
    }
    assert_eq!(of(422), WriteError::Refused("why".to_owned()));
    for code in [429, 500, 504] {
        assert_eq!(of(code), WriteError::Unknown("why".to_owned()));
    }
    assert!(matches!(WriteError::of(&RequestError::NoResponse(MS)), WriteError::Unknown(_)));
}

#[test]
fn a_failed_write_is_tried_again_ever_later_until_it_succeeds_and_another_object_at_once() {
    let (mut failed, start) = (Failures::default(), Instant::now());
    let policy = write(Purpose::Status, "EgressPolicy/t/p", "u");
    let others = [
        write(Purpose::Status, "EgressPolicy/t/p", "v"),
        write(Purpose::Status, "EgressPolicy/t/q", "u"),
        write(Purpose::Addresses, "EgressPolicy/t/p", "u"),
    ];
    let refused = WriteError::Refused("why".to_owned());
    for _ in 0..2 {
        let mut now = start;
        for delay in [250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000] {
            assert_eq!(failed.wait(&policy, now), Duration::ZERO);
            failed.note(&policy, Some(&refused), now);
            assert_eq!(failed.wait(&policy, now), MS * delay);
            assert_eq!(failed.wait(&policy, now + MS * (delay - 1)), MS);
            assert!(others.iter().all(|other| failed.wait(other, now).is_zero()));
            now += MS * delay;
        }
        failed.note(&policy, None, now);
    }
}

#[test]
fn a_missing_right_to_status_holds_the_kind_in_its_namespace() {
    let (mut failed, now) = (Failures::default(), Instant::now());
    let of = |manifest: &str| write(Purpose::Status, manifest, "u");
    let denied = WriteError::Denied("why".to_owned());
    failed.note(&of("EgressPolicy/t/p"), Some(&denied), now);
    assert_eq!(failed.wait(&of("EgressPolicy/t/q"), now), RETRY.0);
    assert_eq!(failed.wait(&of("EgressPolicy/other/q"), now), Duration::ZERO);
    failed.note(&of("EgressPolicy/t/q"), None, now + RETRY.0);
    assert_eq!(failed.wait(&of("EgressPolicy/t/p"), now), Duration::ZERO, "it was granted");
    // Each pool and Service finds out itself.
    failed.note(&write(Purpose::Addresses, "EgressPolicy/t/p", "u"), Some(&denied), now);
    assert_eq!(failed.wait(&write(Purpose::Addresses, "EgressPolicy/t/q", "u"), now), Duration::ZERO);
}

#[test]
fn objects_that_are_gone_are_forgotten() {
    let (mut failed, start) = (Failures::default(), Instant::now());
    for n in 0..1000 {
        let gone = write(Purpose::Status, &format!("EgressPolicy/t/{n}"), "u");
        failed.note(&gone, Some(&WriteError::Conflict), start + Duration::from_secs(n));
        assert!(failed.waiting.len() <= 62, "{}", failed.waiting.len());
    }
}

#[test]
fn writes_are_counted_by_purpose_and_result() {
    let counts = WriteCounts::default();
    counts.count(Purpose::Addresses, None);
    counts.count(Purpose::Status, Some(&WriteError::Denied(String::new())));
    counts.count(Purpose::Events, Some(&WriteError::Unknown(String::new())));
    let counted = counts.family().values.into_iter().filter(|(_, count)| *count > 0);
    let texts: Vec<String> = counted.map(|(labels, _)| format!("{} {}", labels[0].1, labels[1].1)).collect();
    assert_eq!(texts, ["addresses written", "status denied", "events failed"]);
}
