return {'ok', state()}
