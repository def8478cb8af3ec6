//! What a node agent is sent as the view changes.

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryResponse;
use envoy_types::pb::google::rpc;
use futures::FutureExt as _;
use prost::Message as _;

use super::*;
use crate::xds::proto;
use crate::xds::resource::VIEW;

fn view(number: u64) -> Arc<MembershipView> {
    Arc::new(MembershipView { number, ..MembershipView::default() })
}

fn request() -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest { type_url: Kind::View.type_url().to_owned(), ..DeltaDiscoveryRequest::default() }
}

/// A client that is subscribed, with what sends it views.
fn subscribed(number: u64) -> (watch::Sender<Arc<MembershipView>>, ViewStream) {
    let (sender, receiver) = watch::channel(view(number));
    let mut stream = ViewStream::new(receiver);
    assert!(stream.next_response().is_none() && stream.changed().now_or_never().is_none(), "it isn't subscribed yet");
    assert_eq!(stream.handle_request(&request()), Acknowledgment::None);
    (sender, stream)
}

/// The number of the view in the next response, and the nonce.
fn next(stream: &mut ViewStream) -> Option<(u64, String)> {
    let Response { bytes, nonce, .. } = stream.next_response()?;
    let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
    let [resource] = &response.resources[..] else { panic!("{response:?}") };
    let number = proto::View::decode(resource.resource.as_ref().unwrap().value.as_slice()).unwrap().number;
    assert_eq!((&*resource.name, &*resource.version), (VIEW, &*Content::version_text(number)));
    assert_eq!((&*response.type_url, response.removed_resources.len()), (Kind::View.type_url(), 0));
    Some((number, nonce))
}

fn answer(stream: &mut ViewStream, nonce: String, error: Option<&str>) -> Acknowledgment {
    let error_detail = error.map(|message| rpc::Status { code: 3, message: message.to_owned(), details: Vec::new() });
    stream.handle_request(&DeltaDiscoveryRequest { response_nonce: nonce, error_detail, ..request() })
}

#[test]
fn a_client_gets_the_current_view_then_each_later_one_once() {
    let (sender, mut stream) = subscribed(7);
    for number in 7..10 {
        let (sent, nonce) = next(&mut stream).expect("it is there");
        assert_eq!(sent, number);
        assert_eq!(answer(&mut stream, nonce.clone(), None), Acknowledgment::Ack);
        assert_eq!(answer(&mut stream, nonce, None), Acknowledgment::None, "it is answered already");
        sender.send_replace(view(number));
        assert_eq!(next(&mut stream), None, "the same view again");
        sender.send_replace(view(number + 1));
        assert!(stream.changed().now_or_never().is_some());
    }
}

#[test]
fn no_view_is_not_sent() {
    let (sender, mut stream) = subscribed(0);
    assert_eq!(next(&mut stream), None);
    assert!(stream.changed().now_or_never().is_none());
    sender.send_replace(view(1));
    assert!(stream.changed().now_or_never().is_some());
    assert_eq!(next(&mut stream).map(|(number, _)| number), Some(1));
}

#[test]
fn a_client_that_has_not_answered_gets_the_latest_view_only() {
    let (sender, mut stream) = subscribed(1);
    let (_, first) = next(&mut stream).expect("the first one");
    for number in 2..100 {
        sender.send_replace(view(number));
        assert_eq!(next(&mut stream), None);
    }
    assert_eq!(answer(&mut stream, nonce(7), None), Acknowledgment::None);
    assert_eq!(next(&mut stream), None, "another nonce answers nothing");
    assert_eq!(answer(&mut stream, first, None), Acknowledgment::Ack);
    assert_eq!(next(&mut stream).map(|(number, _)| number), Some(99));
}

#[test]
fn a_rejected_view_is_counted_and_the_next_one_is_sent() {
    let (sender, mut stream) = subscribed(1);
    let (_, nonce) = next(&mut stream).expect("the first one");
    let rejected = Acknowledgment::Nack { reason: "no".to_owned(), refused: None };
    assert_eq!(answer(&mut stream, nonce, Some("no")), rejected);
    assert_eq!(next(&mut stream), None);
    sender.send_replace(view(2));
    assert_eq!(next(&mut stream).map(|(number, _)| number), Some(2));
}

#[test]
fn there_are_no_changes_any_more_when_the_authority_has_ended() {
    let (sender, mut stream) = subscribed(1);
    drop(sender);
    assert!(stream.changed().now_or_never().expect("at once").is_err());
}
