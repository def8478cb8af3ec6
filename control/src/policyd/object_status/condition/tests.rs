use super::*;

fn status(conditions: &[(&'static str, bool, &str)]) -> DesiredStatus {
    let condition =
        |(kind, status, message): &(&'static str, bool, &str)| Condition::new(kind, *status, "Reason", message);
    DesiredStatus { conditions: conditions.iter().map(condition).collect(), ..DesiredStatus::default() }
}

#[test]
fn a_condition_keeps_its_time_while_its_status_is_the_same() {
    let first = status(&[("Accepted", true, "a"), ("Programmed", false, "b")]).document(&Value::Null, 1, "t1");
    let expected = json!({"conditions": [
        {"type": "Accepted", "status": "True", "observedGeneration": 1, "lastTransitionTime": "t1",
            "reason": "Reason", "message": "a"},
        {"type": "Programmed", "status": "False", "observedGeneration": 1, "lastTransitionTime": "t1",
            "reason": "Reason", "message": "b"},
    ]});
    assert_eq!(first, expected);
    let second = status(&[("Accepted", true, "c"), ("Programmed", true, "b")]).document(&first, 2, "t2");
    let of = |kind, field: &str| condition_of(&second, kind).unwrap()[field].clone();
    let times = (of("Accepted", "lastTransitionTime"), of("Programmed", "lastTransitionTime"));
    assert_eq!(times, (json!("t1"), json!("t2")));
    assert_eq!((of("Accepted", "observedGeneration"), of("Accepted", "message")), (json!(2), json!("c")));
}

#[test]
fn what_others_have_added_is_no_difference_and_what_is_ours_is() {
    let written = status(&[("Accepted", true, "a")]).document(&Value::Null, 1, "t");
    let mut present = written.clone();
    present["conditions"].as_array_mut().unwrap().push(json!({"type": "Other", "status": "True"}));
    present["theirs"] = 1.into();
    assert!(!differs(Kind::EgressPolicy, &written, &present));
    present["endpoints"] = 1.into();
    assert!(differs(Kind::EgressPolicy, &written, &present), "a field that is no longer written");
    assert!(!differs(Kind::OverlayNode, &written, &present), "no field of this kind");
    present["conditions"][0]["message"] = "b".into();
    assert!(differs(Kind::OverlayNode, &written, &present));
    assert!(differs(Kind::OverlayNode, &written, &Value::Null));
}

#[test]
fn the_record_of_a_pools_addresses_is_no_difference_and_no_part_of_what_is_written() {
    let desired = status(&[("Accepted", true, "a")]);
    let mut present = desired.document(&Value::Null, 1, "t");
    present["addresses"] = json!(["192.0.2.1 EgressPolicy t/p"]);
    let written = desired.document(&present, 1, "t");
    assert_eq!(written.get("addresses"), None);
    assert!(!differs(Kind::AddressPool, &written, &present));
    present["quarantined"] = 1.into();
    assert!(differs(Kind::AddressPool, &written, &present));
}

#[test]
fn a_field_that_is_not_known_now_is_retained() {
    let desired = DesiredStatus { retained: &["version"], ..status(&[("Ready", true, "")]) };
    let document = desired.document(&json!({"version": "1", "vips": 3}), 1, "t");
    assert_eq!((&document["version"], &document["vips"]), (&json!("1"), &Value::Null));
}

#[test]
fn transitions_say_what_the_status_was() {
    let present = status(&[("Accepted", true, "a"), ("Programmed", true, "b")]).document(&Value::Null, 1, "t");
    let desired = status(&[("Accepted", false, "x"), ("Programmed", true, "b"), ("Exhausted", true, "y")]);
    let transitions = desired.transitions(&present);
    let found: Vec<_> = transitions.iter().map(|it| (it.condition.kind, it.before.as_deref())).collect();
    assert_eq!(found, [("Accepted", Some("True")), ("Exhausted", None)]);
}

#[test]
fn a_long_message_is_cut_off_between_characters() {
    let condition = Condition::new("Accepted", false, "Reason", &"é".repeat(3000));
    assert_eq!(condition.message.chars().count(), MAX_MESSAGE + 3);
    assert_eq!(Condition::new("Accepted", false, "Reason", "short").message, "short");
}
