//! Credentials, from the first of these that there is: environment, web identity (IRSA), container credentials (EKS Pod Identity, ECS),
//! the instance's role (IMDSv2).

mod reply;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use aws_credential_types::Credentials as Keys;
use bytes::Bytes;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, Uri};

use self::reply::{AssumeRole, SecurityCredentials};
use super::{endpoint, signature};
use crate::credential::{Authorize, Expiring, FORM, form, read_file};
use crate::error::{CloudError, ErrorKind};
use crate::http::{HttpClient, is_trusted_url};

/// Timeout of requests to metadata servers, which are one hop away or nowhere.
const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// Keys are renewed this long before they end.
const RENEWAL_TIME: Duration = Duration::from_mins(5);
/// Lifetime of an IMDSv2 token, seconds.
const TOKEN_SECONDS: &str = "300";
/// URL of the agent of ECS.
const ECS: &str = "http://169.254.170.2";
/// Agents that have no certificate: those of ECS and of EKS Pod Identity.
const AGENTS: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 23)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)),
];
/// Name of the operation in errors.
const OPERATION: &str = "GetCredentials";

/// Where keys come from.
#[derive(Clone)]
pub enum CredentialSource {
    /// Fixed keys.
    Keys {
        /// Access key id.
        access_key: String,
        /// Secret access key.
        secret_key: String,
        /// Session token, of temporary keys.
        session_token: Option<String>,
    },
    /// A role for a token in a file (AssumeRoleWithWebIdentity).
    WebIdentity {
        /// The token's file, read each time.
        token_file: PathBuf,
        /// The role's ARN.
        role: String,
        /// URL of STS.
        sts: String,
    },
    /// An agent on the host, as EKS Pod Identity and ECS have it.
    Container {
        url: String,
        /// Its authorization token.
        token: ContainerToken,
    },
    /// The role of the instance.
    Instance {
        /// URL of the metadata server.
        imds: String,
    },
}

/// Authorization token of an agent.
#[derive(Clone)]
pub enum ContainerToken {
    /// It wants none.
    None,
    /// In a file, read each time.
    File(PathBuf),
    /// The token itself.
    Value(String),
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl CredentialSource {
    /// The source that the environment names; without one, the instance's role.
    pub fn from_environment(region: &str, variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        if let (Some(access_key), Some(secret_key)) = (set("AWS_ACCESS_KEY_ID"), set("AWS_SECRET_ACCESS_KEY")) {
            return Self::Keys { access_key, secret_key, session_token: set("AWS_SESSION_TOKEN") };
        }
        if let (Some(token_file), Some(role)) = (set("AWS_WEB_IDENTITY_TOKEN_FILE"), set("AWS_ROLE_ARN")) {
            let sts = set("AWS_ENDPOINT_URL_STS").unwrap_or_else(|| endpoint("sts", region));
            return Self::WebIdentity { token_file: token_file.into(), role, sts };
        }
        let relative = set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").map(|path| format!("{ECS}{path}"));
        if let Some(url) = relative.or_else(|| set("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
            let file = set("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(|file| ContainerToken::File(file.into()));
            let value = || set("AWS_CONTAINER_AUTHORIZATION_TOKEN").map(ContainerToken::Value);
            return Self::Container { url, token: file.or_else(value).unwrap_or(ContainerToken::None) };
        }
        // Over IPv6, where the instance has that alone: http://[fd00:ec2::254].
        let imds = set("AWS_EC2_METADATA_SERVICE_ENDPOINT").unwrap_or_else(|| "http://169.254.169.254".to_owned());
        Self::Instance { imds: imds.trim_end_matches('/').to_owned() }
    }

    /// Its name in logs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Keys { .. } => "environment",
            Self::WebIdentity { .. } => "web identity",
            Self::Container { .. } => "container credentials",
            Self::Instance { .. } => "instance metadata",
        }
    }
}

pub(super) struct Credentials {
    source: CredentialSource,
    region: String,
    http: HttpClient,
    metadata: HttpClient,
}

/// Keys with their end; `None`: they have none.
fn keys(access: &str, secret: &str, session_token: Option<&str>, lifetime: Option<Duration>) -> Expiring<Keys> {
    let keys = Keys::new(access, secret, session_token.map(str::to_owned), None, "vipgate");
    Expiring::new(keys, lifetime.unwrap_or(Duration::MAX), RENEWAL_TIME)
}

impl Authorize for Credentials {
    type Credential = Keys;

    async fn fetch(&self) -> Result<Expiring<Keys>, CloudError> {
        match &self.source {
            CredentialSource::Keys { access_key, secret_key, session_token } => {
                Ok(keys(access_key, secret_key, session_token.as_deref(), None))
            }
            CredentialSource::WebIdentity { token_file, role, sts } => {
                let form = form(&[
                    ("Action", "AssumeRoleWithWebIdentity"),
                    ("Version", "2011-06-15"),
                    ("RoleArn", role),
                    ("RoleSessionName", "vipgate"),
                    ("WebIdentityToken", &read_file(OPERATION, token_file).await?),
                ]);
                let request = Request::post(sts.as_str()).header(CONTENT_TYPE, FORM);
                let reply = get(&self.http, request.body(Bytes::from(form))).await?;
                AssumeRole::read(&reply).and_then(AssumeRole::keys)
            }
            CredentialSource::Container { url, token } => {
                check_agent(url)?;
                let token = match token {
                    ContainerToken::None => None,
                    ContainerToken::File(file) => Some(read_file(OPERATION, file).await?),
                    ContainerToken::Value(value) => Some(value.clone()),
                };
                let mut request = Request::get(url.as_str());
                if let Some(token) = token {
                    request = request.header(AUTHORIZATION, token);
                }
                let reply = get(&self.metadata, request.body(Bytes::new())).await?;
                SecurityCredentials::read(&reply).and_then(SecurityCredentials::keys)
            }
            CredentialSource::Instance { imds } => self.of_instance(imds).await,
        }
    }

    fn authorize(&self, keys: Keys, request: &mut Request<Bytes>) -> Result<(), CloudError> {
        signature::sign(&self.region, keys, request)
    }
}

impl Credentials {
    pub(super) fn new(source: CredentialSource, region: &str) -> Self {
        let metadata = HttpClient::with_timeout(METADATA_TIMEOUT);
        Self { source, region: region.to_owned(), http: HttpClient::new(), metadata }
    }

    async fn of_instance(&self, imds: &str) -> Result<Expiring<Keys>, CloudError> {
        let token = Request::builder()
            .method(Method::PUT)
            .uri(format!("{imds}/latest/api/token"))
            .header("x-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS)
            .body(Bytes::new());
        let token = text(&get(&self.metadata, token).await?);
        let metadata = async |path: &str| {
            let request = Request::get(format!("{imds}/latest/meta-data/iam/security-credentials/{path}"))
                .header("x-aws-ec2-metadata-token", &token)
                .header(ACCEPT, "*/*")
                .body(Bytes::new());
            get(&self.metadata, request).await
        };
        let roles = text(&metadata("").await?);
        let role = roles.lines().next().filter(|role| !role.is_empty());
        let role = role.ok_or_else(|| error("NoRole", "the instance has no role"))?;
        SecurityCredentials::read(&metadata(role).await?).and_then(SecurityCredentials::keys)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

fn error(code: &str, message: &str) -> CloudError {
    CloudError::new(ErrorKind::Credentials, OPERATION, code, message)
}

/// Fails if keys of an agent could be read on the way, or its token: HTTP only to the machine itself.
fn check_agent(url: &str) -> Result<(), CloudError> {
    let parsed: Option<Uri> = url.parse().ok();
    let host = parsed.as_ref().and_then(Uri::host).map(|host| host.trim_matches(['[', ']']));
    let is_agent = host.and_then(|host| host.parse().ok()).is_some_and(|host: IpAddr| AGENTS.contains(&host));
    let is_http = parsed.as_ref().and_then(Uri::scheme_str) == Some("http");
    if is_trusted_url(url) || is_http && is_agent {
        return Ok(());
    }
    Err(error(
        "Url",
        "the URL for container credentials must be https://, or http:// with a loopback or link-local agent's address",
    ))
}

/// The body of a successful response. Errors have nothing of the request or the response in them but the status.
async fn get(http: &HttpClient, request: Result<Request<Bytes>, hyper::http::Error>) -> Result<Bytes, CloudError> {
    let request = request.map_err(|cause| error("Request", &cause.to_string()))?;
    let host = request.uri().host().unwrap_or_default().to_owned();
    let response = http.send(request).await.map_err(|cause| error("NotReachable", &format!("{host}: {cause}")))?;
    if response.status().is_success() {
        return Ok(response.into_body());
    }
    let code = super::reply::error_of(response.body()).map(|(code, _)| code);
    let code = code.unwrap_or_else(|| response.status().as_u16().to_string());
    Err(error(&code, &format!("{host} refuses credentials with status {}", response.status().as_u16())))
}
