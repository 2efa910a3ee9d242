"""Uploads an exported folder to the Hugging Face hub (`export --push NAME`)."""

from pathlib import Path

from ....errors import InputError, reason


def check_name(name: str) -> None:
    """Raises InputError if no repository of the hub may have this name, or there is no token. Sends nothing."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        why = reason(error)
        raise InputError(f"--push {name!r} cannot be a repository of the hub: {why}; give user/name") from error
    if not get_token():
        raise InputError(f"--push {name!r} needs a token that may write: set HF_TOKEN, or type `hf auth login`")


def push(folder: Path, name: str) -> str:
    """Uploads `folder` as one commit and returns the repository's address. A new repository is private; one that exists
    stays as public as it is. Raises InputError if the hub refuses, or cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub = HfApi()
    try:
        address = hub.create_repo(name, private=True, exist_ok=True)
        message = "Upload the folder that `export` wrote"
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # HfHubHTTPError, the HTTP client's errors, OSError
        why = getattr(error, "server_message", None) or reason(error)
        later = f"{folder} is written: `hf upload --private {name} {folder}` uploads it later"
        raise InputError(f"--push {name!r} failed: {reason(why)}; {later}") from error
    return str(address)
